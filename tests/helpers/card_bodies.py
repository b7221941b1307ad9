"""Assertions for a real GPU (`-m gpu`) and for a simulated one (by default)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.acceleration.precision import FastCopies
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.scheduler import Group, Scheduler
from tests.helpers.small_nets import LINF, QUICK, SHAPE, ShortOfMemory, images, mixture

AT_THE_BORDER = 2  # images that float32 may break and another arithmetic not


def results_are_those_of_float32(attack: str, copies: FastCopies, n: int, budget: AttackBudget = QUICK) -> None:
    """No more images remain robust than in float32, they do remain robust, and bits do not depend on the batch."""
    mixed, x = mixture().to("cuda"), images(n, SHAPE).to("cuda")
    y = mixed.predict(x)
    options = {"threat": LINF, "attacks": (attack,), "budget": budget, "batch_size": 16}
    found = autoattack(mixed, x, y, precision=copies, **options)
    plain = autoattack(mixed, x, y, precision="fp32", **options)
    assert torch.equal(found.robust, mixed.predict(found.x_adv) == y)
    assert int(found.robust.sum()) <= int(plain.robust.sum()) + AT_THE_BORDER
    some = slice(n // 6, n // 2)
    again = autoattack(mixed, x[some], y[some], sample_ids=range(n)[some], precision="fp32", **options)
    assert torch.equal(again.x_adv, plain.x_adv[some])


def no_round_waits(attack: str, refused: Callable[[], AbstractContextManager[object]]) -> None:
    """A steady step of a batch, in which `refused` makes every wait of the host an error."""
    mixed, x = mixture().to("cuda"), images(16, SHAPE).to("cuda")
    y = mixed.predict(x)
    engine = Scheduler(
        mixed, x, threat=LINF, attacks=(attack,), budget=QUICK, shape=BatchShape(16, fixed=True),
        copies=FastCopies("fp32"),
    )  # fmt: skip
    engine.admit(Group(x, y, range(16)))
    batch = next(each for each in engine._batches if each.n_runs)
    batch.step()  # fills the slots
    with refused():
        batch.step()  # no flag is read before the fourth step


def memory_that_ends_loses_nothing() -> None:
    """The same robust images if a pass of more than 5 images runs out of memory."""
    mixed, x = mixture().to("cuda"), images(24, SHAPE).to("cuda")
    y = mixed.predict(x)
    options = {"threat": LINF, "attacks": ("apgd-ce",), "budget": QUICK, "precision": "fp32", "batch_size": 16}
    expected = autoattack(mixed, x, y, **options)
    short = mixture().to("cuda")
    short.rob = ShortOfMemory(short.rob, 5)
    found = autoattack(short, x, y, **options)
    assert short.rob.refused > 0
    assert torch.equal(found.robust, expected.robust)

"""The attack in examples/pgd.py equals a plain loop and runs as an extension."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.attack import Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.register import ATTACKS, load_extensions
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.norms.ball import ball_of
from tests.helpers.stepping import iterates, start_keys

EXAMPLE = Path(__file__).parents[2] / "examples" / "pgd.py"
LINF = ThreatModel("Linf", 0.03)


@pytest.fixture(autouse=True)
def example() -> Iterator[Any]:
    """Register the attack for one test; other tests count the package's own attacks."""
    load_extensions([str(EXAMPLE)])
    home = ATTACKS.entries()["pgd-20"].home
    yield sys.modules[home]
    ATTACKS.forget(home)


def test_pgd_iterates_equal_a_plain_loop(victim, example: Any) -> None:
    model, x, y = victim(n=6)
    seen = iterates(example.pgd_20(Setting(LINF, AttackBudget(), 10))[0], model, x, y)
    expected = ball_of(LINF).random_start(x, start_keys("pgd-20", 6))
    for step, mine in enumerate(seen):
        assert torch.allclose(mine, expected, atol=1e-7), step
        leaf = expected.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(leaf), y, reduction="sum"), leaf)
        moved = expected + 0.03 / 4 * grad.sign()
        expected = moved.clamp(x - 0.03, x + 0.03).clamp(0, 1)
    assert len(seen) == 21


def test_pgd_keeps_the_contract_of_an_attack(victim) -> None:
    """It runs in an ensemble, with the same bits in any order and partition, without torch's global generator."""
    model, x, y = victim()
    options = {"threat": LINF, "attacks": ("pgd-20",), "batch_size": 8, "precision": "fp32"}
    state = torch.random.get_rng_state()
    whole = autoattack(model, x, y, **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert 0 < int(whole.robust.sum()) < len(x)
    assert torch.equal(whole.robust, model(whole.x_adv).argmax(dim=1) == y)
    order = [7, 3, 9]
    part = autoattack(model, x[order], y[order], sample_ids=order, **options)
    assert torch.equal(part.x_adv, whole.x_adv[order])
    other = autoattack(model, x, y, sample_ids=range(100, 100 + len(x)), **options)
    assert not torch.equal(other.x_adv, whole.x_adv)
    ensemble = autoattack(model, x, y, **{**options, "attacks": ("pgd-20", "apgd-ce", "apgd-t")})
    assert list(ensemble.survived) == ["pgd-20", "apgd-ce", "apgd-t"]
    assert torch.equal(ensemble.survived["pgd-20"], whole.robust)
    assert int(ensemble.robust.sum()) <= int(whole.robust.sum())


@pytest.mark.parametrize("out", [lambda x: x + 0.2 * x.sign(), lambda x: x - 1])
def test_an_attack_that_leaves_the_ball_or_the_pixel_range_is_rejected(
    victim, example: Any, monkeypatch: pytest.MonkeyPatch, out: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, x, y = victim(n=6)
    monkeypatch.setattr(example.PgdSteps, "ask", lambda _, state: out(state.x_adv))
    with pytest.raises(
        InvalidInputError, match=r"the attack pgd-20 returned a point outside of Linf.*set `stays_inside"
    ):
        autoattack(model, x, y, threat=LINF, attacks=["pgd-20"])

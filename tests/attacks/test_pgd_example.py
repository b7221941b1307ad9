"""The attack in examples/pgd.py equals a plain loop and runs as an extension."""

import sys
from collections.abc import Iterator
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
    seen = iterates(example.Pgd(Setting(LINF, AttackBudget(), 10)), model, x, y)
    expected = ball_of(LINF).random_start(x, start_keys("pgd-20", 6))
    for step, mine in enumerate(seen):
        assert torch.allclose(mine, expected, atol=1e-7), step
        leaf = expected.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(leaf), y, reduction="sum"), leaf)
        moved = expected + 0.03 / 4 * grad.sign()
        expected = moved.clamp(x - 0.03, x + 0.03).clamp(0, 1)
    assert len(seen) == 21


def test_pgd_keeps_the_best_point(victim) -> None:
    model, x, y = victim()
    found = autoattack(model, x, y, threat=LINF, attacks=("pgd-20",))
    assert 0 < int(found.robust.sum()) < len(x)
    assert torch.equal(found.robust, model(found.x_adv).argmax(dim=1) == y)
    stronger = autoattack(model, x, y, threat=LINF, attacks=("apgd-ce", "apgd-t"))
    assert int(stronger.robust.sum()) <= int(found.robust.sum())

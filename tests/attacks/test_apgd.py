"""APGD against the published implementation, iterate by iterate."""

import math

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted, L1_projection
from torch import Tensor

from mixednuts_dist.attacks.apgd import apgd_ce, apgd_dlr, apgd_t
from mixednuts_dist.attacks.attack import Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.plans import passes_of
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.norms.ball import ball_of
from tests.helpers.stepping import iterates, start_keys

pytestmark = pytest.mark.filterwarnings("ignore:there are . points with zero gradient")  # DLR can be constant

LOSS = {apgd_ce: "ce", apgd_dlr: "dlr"}  # by the published name


def published_iterates(model, x, y, targets, start, threat, n_iter, loss) -> list[Tensor]:
    """Return all that the package evaluates from one start, in L1 in balls of 3, 2 and 1 radii."""
    seen: list[Tensor] = []

    def watched(x_now: Tensor) -> Tensor:
        seen.append(x_now.detach().clone())
        return model(x_now)

    options = {"n_iter": n_iter, "norm": threat.norm, "eps": threat.eps, "seed": 0, "device": x.device}
    options["use_largereps"] = threat.norm == "L1"
    if targets is y:
        attack = APGDAttack(watched, loss=loss, **options)
    else:
        attack = APGDAttack_targeted(watched, **options)
        attack.y_target = targets
    attack.init_hyperparam(x)
    first = math.ceil(0.3 * n_iter)
    balls = [(3, first), (2, first), (1, n_iter - 2 * first)] if threat.norm == "L1" else [(1, n_iter)]
    x_init = start
    for radii, attack.n_iter in balls:
        attack.eps = radii * threat.eps
        if x_init is not start:  # as its `decr_eps_pgd`, which projects the start once more
            x_init = x_init + L1_projection(x, x_init - x, attack.eps)
        x_init = attack.attack_single_run(x, y, x_init=x_init)[0]
    return seen


every_attack = pytest.mark.parametrize("attack", [apgd_ce, apgd_dlr, apgd_t])


@every_attack
@pytest.mark.parametrize(
    "threat", [ThreatModel("Linf", 0.03), ThreatModel("Linf", 0.2), ThreatModel("L2", 0.5)], ids=str
)
@pytest.mark.parametrize("n_iter", [100, 20])
def test_iterates_equal_the_published_ones(victim, threat: ThreatModel, attack, n_iter: int) -> None:
    apart, behind = both(victim(n=10), attack, threat, n_iter)
    assert len(apart) == n_iter + 1
    assert float(apart[~behind].max()) < 1e-6, apart.amax(dim=0)
    assert int((~behind).sum()) > 30


def both(victim, attack, threat: ThreatModel, n_iter: int) -> tuple[Tensor, Tensor]:
    """Return the distances between our iterates and the published ones, and which come after a constant loss."""
    model, x, y = victim
    targets = y if attack in LOSS else model(x).argsort(dim=1)[:, -2]
    run = attack(Setting(threat, AttackBudget(n_iter=n_iter), 10))[0]
    keys = start_keys(run.name if attack in LOSS else "apgd-t/2", len(x))
    largest = ThreatModel(threat.norm, 3 * threat.eps) if threat.norm == "L1" else threat
    ours = iterates(run, model, x, y, targets)
    start = ball_of(largest).random_start(x, keys)
    published = published_iterates(model, x, y, targets, start, threat, n_iter, LOSS.get(attack))
    apart = torch.stack([(a - b).flatten(1).abs().amax(dim=1) for a, b in zip(ours, published, strict=True)])
    # If the label is third, DLR is 1 whatever the logits, and the signs of its gradient are those of roundings.
    third = torch.stack([model(x).argsort(dim=1)[:, -3] == y for x in published])
    return apart, (third.cumsum(dim=0) - third.long() > 0) & (attack is apgd_dlr)


@every_attack
@pytest.mark.parametrize(("eps", "n_iter"), [(4.0, 100), (1.5, 100), (4.0, 20)])
def test_iterates_in_l1_equal_the_published_ones(victim, attack, eps: float, n_iter: int) -> None:
    """Through all three balls. Rounding may choose another pixel among equals: nearly all images stay together."""
    apart, behind = both(victim(n=12), attack, ThreatModel("L1", eps), n_iter)
    assert len(apart) == n_iter + 3
    apart[behind] = 0
    assert int((apart > 0).sum()) > 36
    assert int((apart.amax(dim=0) < 1e-4).sum()) >= 11, apart.amax(dim=0)


def test_restarts_are_independent_runs_from_other_starts() -> None:
    setting = Setting(ThreatModel("Linf", 0.1), AttackBudget(n_iter=7, n_restarts=3), 10)
    runs = apgd_dlr(setting)
    assert [(run.restart, run.loss) for run in runs] == [(i, "untargeted-dlr") for i in range(3)]
    assert {(run.block, run.stepper) for run in runs} == {(runs[0].block, apgd_t(setting)[0].stepper)}
    assert passes_of("apgd-dlr", setting.budget, 10) == (24, 24)

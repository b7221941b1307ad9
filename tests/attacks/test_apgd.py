"""APGD against the published implementation, iterate by iterate."""

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor

from mixednuts_dist.attacks.apgd import ApgdCe, ApgdT
from mixednuts_dist.attacks.attack import Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.norms.ball import ball_of
from mixednuts_dist.threat import ThreatModel

from .conftest import arrivals, iterates, one_pass


def published_iterates(model, x, y, targets, start, threat, n_iter) -> list[Tensor]:
    seen: list[Tensor] = []

    def watched(x_now: Tensor) -> Tensor:
        seen.append(x_now.detach().clone())
        return model(x_now)

    options = {"n_iter": n_iter, "norm": threat.norm, "eps": threat.eps, "seed": 0, "device": x.device}
    if targets is y:
        attack = APGDAttack(watched, loss="ce", **options)
    else:
        attack = APGDAttack_targeted(watched, **options)
        attack.y_target = targets
    attack.init_hyperparam(x)
    attack.attack_single_run(x, y, x_init=start)
    return seen


@pytest.mark.parametrize("norm_eps", [("Linf", 0.03), ("Linf", 0.2), ("L2", 0.5)], ids=str)
@pytest.mark.parametrize("attack", [ApgdCe, ApgdT])
@pytest.mark.parametrize("n_iter", [100, 20])
def test_iterates_equal_the_published_ones(victim, norm_eps: tuple[str, float], attack, n_iter: int) -> None:
    model, x, y = victim(n=10)
    threat = ThreatModel(*norm_eps)
    targets = y if attack is ApgdCe else model(x).argsort(dim=1)[:, -2]
    name = "apgd-ce" if attack is ApgdCe else "apgd-t/2"
    start = ball_of(threat).random_start(x, [(0, name, 0, i) for i in range(len(x))])
    ours = iterates(attack(Setting(threat, AttackBudget(n_iter=n_iter), 10)), model, x, y, targets)
    published = published_iterates(model, x, y, targets, start, threat, n_iter)
    assert len(ours) == len(published) == n_iter + 1
    for i, (mine, theirs) in enumerate(zip(ours, published, strict=True)):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0), f"iterate {i}: {(mine - theirs).abs().max()}"


def test_examples_at_different_iterations_do_not_disturb_each_other(victim) -> None:
    """Images that sit down late walk the same path as images that were there from the start."""
    model, x, y = victim(n=6)
    attack = ApgdCe(Setting(ThreatModel("Linf", 0.1), AttackBudget(n_iter=30), 10))
    together = iterates(attack, model, x, y)[-1]
    arrived, state = arrivals(attack, x, y), attack.state(x)
    attack.begin(state, torch.arange(3), arrived.at(range(3)))
    last: dict[int, Tensor] = {}
    for step in range(31 + 7):
        if step == 7:
            attack.begin(state, torch.arange(3, 6), arrived.at(range(3, 6)))
        due = state.iteration.clone()
        x_new, _ = one_pass(attack, state, model, y, y)
        last |= {i: x_new[i] for i in range(6) if int(due[i]) == 30 and (i < 3 or step >= 7)}
    assert torch.allclose(torch.stack([last[i] for i in range(6)]), together, atol=1e-6)

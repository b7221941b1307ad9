"""APGD against the published implementation, iterate by iterate."""

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor

from mixednuts_dist.attacks.apgd import ApgdSchedule, ApgdState, absorb, propose
from mixednuts_dist.attacks.losses import mixed_loss
from mixednuts_dist.attacks.projections import random_start
from mixednuts_dist.threat import Norm, ThreatModel


def our_iterates(model, x, y, targets, start, threat, n_iter) -> list[Tensor]:
    schedule = ApgdSchedule(n_iter)
    state = ApgdState.start(x, start, threat, schedule)
    seen = []
    for _ in range(n_iter + 1):
        x_new = propose(state, threat).requires_grad_()
        loss = mixed_loss(model(x_new), y, targets)
        (grad,) = torch.autograd.grad(loss.sum(), x_new)
        absorb(state, x_new.detach(), loss.detach(), grad, schedule)
        seen.append(x_new.detach())
    return seen


def published_iterates(model, x, y, targets, start, threat, n_iter) -> list[Tensor]:
    seen: list[Tensor] = []

    def watched(x_now: Tensor) -> Tensor:
        seen.append(x_now.detach().clone())
        return model(x_now)

    options = {"n_iter": n_iter, "norm": threat.norm, "eps": threat.eps, "seed": 0, "device": x.device}
    if targets[0] < 0:
        attack = APGDAttack(watched, loss="ce", **options)
    else:
        attack = APGDAttack_targeted(watched, **options)
        attack.y_target = targets
    attack.init_hyperparam(x)
    attack.attack_single_run(x, y, x_init=start)
    return seen


@pytest.mark.parametrize("norm_eps", [("Linf", 0.03), ("Linf", 0.2), ("L2", 0.5)], ids=str)
@pytest.mark.parametrize("loss", ["ce", "dlr-targeted"])
@pytest.mark.parametrize("n_iter", [100, 20])
def test_iterates_equal_the_published_ones(victim, norm_eps: tuple[Norm, float], loss: str, n_iter: int) -> None:
    model, x, y = victim(n=10)
    threat = ThreatModel(*norm_eps)
    targets = torch.full_like(y, -1) if loss == "ce" else model(x).argsort(dim=1)[:, -2]
    start = random_start(x, [(0, "test", 0, i) for i in range(len(x))], threat)
    ours = our_iterates(model, x, y, targets, start, threat, n_iter)
    published = published_iterates(model, x, y, targets, start, threat, n_iter)
    assert len(ours) == len(published) == n_iter + 1
    for i, (mine, theirs) in enumerate(zip(ours, published, strict=True)):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0), f"iterate {i}: {(mine - theirs).abs().max()}"


def test_examples_at_different_iterations_do_not_disturb_each_other(victim) -> None:
    """Slots that join late walk the same path as slots that were there from the start."""
    model, x, y = victim(n=6)
    threat, schedule = ThreatModel("Linf", 0.1), ApgdSchedule(30)
    start = random_start(x, [(0, i) for i in range(len(x))], threat)
    untargeted = torch.full_like(y, -1)
    together = our_iterates(model, x, y, untargeted, start, threat, 30)[-1]
    state = ApgdState.start(x[:3], start[:3], threat, schedule)
    labels = y[:3]
    last: dict[int, Tensor] = {}
    for step in range(31 + 7):
        if step == 7:
            late = ApgdState.start(x[3:], start[3:], threat, schedule)
            fields = vars(state)
            state = ApgdState(**{name: torch.cat([value, getattr(late, name)]) for name, value in fields.items()})
            labels = y
        due = state.iteration.clone()
        x_new = propose(state, threat).requires_grad_()
        loss = mixed_loss(model(x_new), labels, torch.full_like(labels, -1))
        (grad,) = torch.autograd.grad(loss.sum(), x_new)
        absorb(state, x_new.detach(), loss.detach(), grad, schedule)
        last |= {i: x_new[i].detach() for i in range(len(labels)) if due[i] == 30}
    assert torch.allclose(torch.stack([last[i] for i in range(6)]), together, atol=1e-6)


def test_the_best_loss_never_falls_and_steps_only_shrink(victim) -> None:
    model, x, y = victim()
    threat, schedule = ThreatModel("Linf", 0.1), ApgdSchedule(50)
    state = ApgdState.start(x, x.clone(), threat, schedule)
    best, step = torch.full((len(x),), -torch.inf), torch.full((len(x),), torch.inf)
    for _ in range(51):
        x_new = propose(state, threat).requires_grad_()
        loss = mixed_loss(model(x_new), y, torch.full_like(y, -1))
        (grad,) = torch.autograd.grad(loss.sum(), x_new)
        absorb(state, x_new.detach(), loss.detach(), grad, schedule)
        assert bool((state.loss_best >= best).all())
        assert bool((state.step_size <= step).all())
        best, step = state.loss_best, state.step_size
    assert float(step.min()) < 0.2

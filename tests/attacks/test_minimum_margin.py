"""MMAA: laws, edge cases, and never weaker than the published pair of attacks."""

from collections.abc import Callable

import pytest
import torch
from pyautoattack import AutoAttack
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack, minimum_margin_attack
from mixednuts_dist.attacks.attack import BORDERLINE
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.margins import signed_margin

LINF = ThreatModel("Linf", 0.015)


@pytest.mark.parametrize("norm_eps", [("Linf", 0.015), ("L2", 0.15)], ids=str)
def test_robust_accuracy_is_not_above_the_published_pair(victim, norm_eps) -> None:
    model, x, y = victim(n=16)
    norm, eps = norm_eps
    found = minimum_margin_attack(model, x, y, threat=ThreatModel(norm, eps), n_iter=100)
    published = AutoAttack(
        model, norm=norm, eps=eps, attacks=["apgd-ce", "apgd-t"], version="custom", seed=0, device="cpu"
    )
    x_adv = published.run_standard_evaluation(x, y, batch_size=16)[0]
    assert int((~found.broken).sum()) <= int((model(x_adv).argmax(dim=1) == y).sum())


def test_images_that_are_wrong_already_cost_nothing(victim) -> None:
    model, x, y = victim(n=4)
    found = minimum_margin_attack(model, x, (y + 1) % 10, threat=LINF, n_iter=10)
    assert bool(found.broken.all())
    assert torch.equal(found.x_adv, x)
    assert found.n_backward == 0


class Changed(nn.Module):
    """A classifier of changed images, with scaled logits."""

    def __init__(self, net: nn.Module, *, scale: float = 1.0, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.net, self.scale, self.before = net, scale, before

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(self.before(x))


def test_a_saturated_softmax_does_not_hide_the_smallest_margin(victim) -> None:
    model, x, y = victim(n=8)
    sharp = Changed(model, scale=300)  # its float32 softmax is exactly one-hot nearly everywhere
    threat = ThreatModel("Linf", 0.01)
    found = minimum_margin_attack(sharp, x, y, threat=threat, n_iter=20, n_target_classes=3)
    held = ~found.broken
    assert bool(held.any())
    assert not bool((found.x_adv[held] == x[held]).flatten(1).all(dim=1).any())
    gap = lambda images: sharp(images).double().topk(2, dim=1).values.diff(dim=1).abs().squeeze(1)  # noqa: E731
    assert bool((gap(found.x_adv[held]) < gap(x[held])).all())


def test_borderline_images_are_attacked_again(victim) -> None:
    """Only those, and never to a larger margin."""
    model, x, y = victim(n=120)
    options = {"threat": ThreatModel("Linf", 0.015), "n_iter": 10, "n_target_classes": 2, "precision": "fp32"}
    once = minimum_margin_attack(model, x, y, border_restarts=0, **options)
    clean = signed_margin(model(x).double().softmax(dim=1), y)
    near = ~once.broken & (once.margin < BORDERLINE * clean.clamp(min=0.1))
    again = minimum_margin_attack(model, x, y, border_restarts=1, **options)
    assert bool(near.any())
    assert again.n_backward - once.n_backward <= int(near.sum()) * 3 * 11
    assert again.n_backward > once.n_backward
    assert torch.equal(again.x_adv[~near], once.x_adv[~near])
    assert bool((again.margin <= once.margin + 1e-9).all())


def test_going_on_after_a_break_finds_smaller_margins(victim) -> None:
    model, x, y = victim()
    options = {"threat": LINF, "n_iter": 20, "n_target_classes": 3, "precision": "fp32"}
    first = minimum_margin_attack(model, x, y, stop_when_broken=True, **options)
    last = minimum_margin_attack(model, x, y, stop_when_broken=False, border_restarts=0, **options)
    assert bool((last.margin <= first.margin + 1e-6).all())
    assert float(last.margin[last.broken].mean()) < float(first.margin[last.broken].mean())
    assert last.n_backward == len(x) * 4 * 21


def test_black_box_margins_approach_gradient_margins(victim) -> None:
    model, x, y = victim()
    options = {
        "threat": ThreatModel("Linf", 0.03),
        "attacks": ["square-margin"],
        "budget": AttackBudget(n_queries=150),
        "precision": "fp32",
    }
    blind = Changed(model, before=Tensor.detach)
    stopped, onward = (autoattack(blind, x, y, stop_when_broken=stop, **options) for stop in (True, False))
    gradients = minimum_margin_attack(
        model, x, y, threat=options["threat"], n_iter=30, n_target_classes=3, stop_when_broken=False
    )
    assert bool(stopped.broken.any())
    assert bool(stopped.broken.logical_not().any())
    assert torch.equal(onward.broken, stopped.broken)
    assert bool((onward.margin <= stopped.margin + 1e-9).all())
    assert bool((onward.margin[onward.broken] < stopped.margin[onward.broken]).any())
    assert float((onward.margin - gradients.margin).mean()) < 0.1
    assert float((onward.margin - gradients.margin).min()) > -0.02

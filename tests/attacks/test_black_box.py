"""Black-box MMAA finds true margins without a gradient."""

import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack, minimum_margin_attack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.threat import ThreatModel

LINF = ThreatModel("Linf", 0.03)


class Detached(nn.Module):
    """A classifier without a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.detach())


def test_black_box_margins_approach_gradient_margins(victim) -> None:
    model, x, y = victim()
    options = {"threat": LINF, "attacks": ["square-margin"], "budget": AttackBudget(n_queries=150), "precision": "fp32"}
    stopped, onward = (autoattack(Detached(model), x, y, stop_when_broken=stop, **options) for stop in (True, False))
    gradients = minimum_margin_attack(model, x, y, threat=LINF, n_iter=30, n_target_classes=3, stop_when_broken=False)
    assert bool(stopped.broken.any())
    assert bool(stopped.broken.logical_not().any())
    assert torch.equal(onward.broken, stopped.broken)
    assert bool((onward.margin <= stopped.margin + 1e-9).all())
    assert bool((onward.margin[onward.broken] < stopped.margin[onward.broken]).any())
    assert float((onward.margin - gradients.margin).mean()) < 0.1
    assert float((onward.margin - gradients.margin).min()) > -0.02

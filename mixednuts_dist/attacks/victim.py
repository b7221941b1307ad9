"""What an attack sees of a classifier: logits to climb on and logits to be judged by.

For one classifier both are its own. Against the mixed classifier they may differ (paper, appendix B.2): the climb goes
on the differentiable surrogate, and only the real mixture decides whether an image is broken.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

AttackMode = str  # "transfer" or "bypass"
ATTACK_MODES = ("transfer", "bypass")


@dataclass(frozen=True)
class Victim:
    """A classifier under attack; every callable takes images (B, C, H, W) in [0, 1] and returns logits (B, K)."""

    judge: Callable[[Tensor], Tensor]  # the classifier itself; called without gradients
    climb_and_judge: Callable[[Tensor], tuple[Tensor, Tensor]]  # differentiable logits, and the classifier's own

    @classmethod
    def of(cls, model: Callable[[Tensor], Tensor]) -> "Victim":
        """A single differentiable classifier."""

        def both(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
            logits_BK = model(x_BCHW)
            return logits_BK, logits_BK.detach()

        return cls(model, both)

    @classmethod
    def of_mixed(cls, mixed: MixedClassifier, mode: AttackMode) -> "Victim":
        """The mixed classifier: "transfer" climbs on f_aux, "bypass" on f_mix's value with f_aux's gradient."""
        if mode == "transfer":
            return cls(mixed, mixed.forward_with_surrogate)
        if mode == "bypass":
            bypass = mixed.as_bypass()
            return cls(mixed, Victim.of(bypass).climb_and_judge)
        raise InvalidInputError(f"mode={mode!r} is not an attack mode; valid modes: {', '.join(ATTACK_MODES)}")


@torch.no_grad()
def judged_logits(victim: Victim, x_BCHW: Tensor, batch_size: int) -> Tensor:
    """The classifier's own logits in float32, `batch_size` images at a time, shape (B, K)."""
    return torch.cat([victim.judge(x).float() for x in torch.split(x_BCHW, batch_size)])

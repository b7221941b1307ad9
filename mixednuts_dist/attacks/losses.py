"""Adversarial losses to maximize, one value per image; adding a constant to all logits does not change them.

A registered loss takes the outputs of a pass, the labels and the targets (the labels if there is no target). To
use it, give its name to `apgd.apgd_runs`.

Shapes: B images, K classes.
"""

# ruff: noqa: ARG001 - all registered functions have the same arguments, and some need fewer

import math

import torch.nn.functional as F
from torch import Tensor

from ..config.register import LOSSES
from ..mixing.margins import at, others
from .gradient_model import Outputs

_TINY = 1e-12  # added to DLR's denominator, as in AutoAttack, so that equal logits do not divide by zero


@LOSSES("ce", describes="cross-entropy of the label")
def ce(outputs: Outputs, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Cross-entropy, in nats."""
    return F.cross_entropy(outputs.logits, labels_B, reduction="none")


@LOSSES("untargeted-dlr", describes="difference of logits ratio")
def untargeted_dlr(outputs: Outputs, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Difference of logits ratio (DLR; Croce & Hein 2020, eq. 6)."""
    lead_B = others(outputs.logits, labels_B).amax(dim=1) - at(outputs.logits, labels_B)
    return _ratio(lead_B, outputs.logits, n_low=1)


@LOSSES("dlr", describes="targeted difference of logits ratio")
def dlr(outputs: Outputs, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Targeted DLR (Croce & Hein 2020, eq. 7); with K = 3, its denominator is that of the untargeted loss."""
    return _ratio(at(outputs.logits, targets_B) - at(outputs.logits, labels_B), outputs.logits, n_low=2)


def _ratio(lead_B: Tensor, logits_BK: Tensor, n_low: int) -> Tensor:
    """Divide by the largest logit minus the mean of the third and, if `n_low` is 2, the fourth; not with K = 2."""
    if logits_BK.shape[1] < 3:
        return lead_B
    falling_BK = logits_BK.sort(dim=1).values.flip(1)
    low_B = falling_BK[:, 2] if n_low == 1 or logits_BK.shape[1] == 3 else 0.5 * (falling_BK[:, 2] + falling_BK[:, 3])
    return lead_B / (falling_BK[:, 0] - low_B + _TINY)


@LOSSES("margin", describes="log(1 - signed margin), which does not saturate")
def margin(outputs: Outputs, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """`log(1 - (p_y - max_{j != y} p_j))`: the other classes' probabilities, with the largest of them counted twice."""
    others_BK = others(outputs.logits, labels_B)
    twice_BK = F.one_hot(others_BK.argmax(dim=1), others_BK.shape[1]).to(others_BK) * math.log(2)
    return (others_BK + twice_BK).logsumexp(dim=1) - outputs.logits.logsumexp(dim=1)


def anyone(mask: Tensor) -> bool:
    """Return whether any entry is true. On an accelerator, return True at once, because reading the mask would wait."""
    return mask.device.type != "cpu" or bool(mask.any())

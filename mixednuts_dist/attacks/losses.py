"""Adversarial losses to maximize, one value per image; adding a constant to all logits does not change them.

A registered loss takes the outputs of a pass, the labels, the targets (the labels if there is no target) and one weight
per image. To use it, set `Run.loss` to its name, or `loss` in a subclass of `ApgdCe`. APGD passes weights of 1; only
the joint attack passes `Run.weight`.

Shapes: B images, K classes.
"""

# ruff: noqa: ARG001 - all registered functions have the same arguments, and some need fewer

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.register import LOSSES
from ..errors import InvalidInputError
from ..mixing.margins import at, others
from .gradient_model import MixedOutputs, Outputs

_TINY = 1e-12  # added to DLR's denominator, as in AutoAttack, so that equal logits do not divide by zero


@LOSSES("ce", describes="cross-entropy of the label")
def ce(outputs: Outputs, labels_B: Tensor, targets_B: Tensor, weights_B: Tensor) -> Tensor:
    """Cross-entropy, in nats."""
    return F.cross_entropy(outputs.logits, labels_B, reduction="none")


@LOSSES("untargeted-dlr", describes="difference of logits ratio")
def untargeted_dlr(outputs: Outputs, labels_B: Tensor, targets_B: Tensor, weights_B: Tensor) -> Tensor:
    """Difference of logits ratio (DLR; Croce & Hein 2020, eq. 6)."""
    lead_B = others(outputs.logits, labels_B).amax(dim=1) - at(outputs.logits, labels_B)
    return _ratio(lead_B, outputs.logits, n_low=1)


@LOSSES("dlr", describes="targeted difference of logits ratio")
def dlr(outputs: Outputs, labels_B: Tensor, targets_B: Tensor, weights_B: Tensor) -> Tensor:
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
def margin(outputs: Outputs, labels_B: Tensor, targets_B: Tensor, weights_B: Tensor) -> Tensor:
    """`log(1 - (p_y - max_{j != y} p_j))`, as a difference of two logsumexp, which does not saturate.

    1 - p_y + max_{j != y} p_j is the sum of the other classes' probabilities with the largest of them counted twice.
    """
    others_BK = others(outputs.logits, labels_B)
    twice_BK = F.one_hot(others_BK.argmax(dim=1), others_BK.shape[1]).to(others_BK) * math.log(2)
    return (others_BK + twice_BK).logsumexp(dim=1) - outputs.logits.logsumexp(dim=1)


@LOSSES("joint", describes="the margins of both base classifiers to the target, for mixed classifiers")
def joint(outputs: Outputs, labels_B: Tensor, targets_B: Tensor, weights_B: Tensor) -> Tensor:
    """`log(1 - (p_y - p_k)) + w min(0, g_k - max_{j != k} g_j)`, for label y, target k and weight w.

    p are the transformed robust probabilities, and g are the standard logits. 1 - (p_y - p_k) equals 2 p_k plus the p_j
    of all classes except y and k. All terms are positive, so the loss does not saturate if p_y is close to 1.
    """
    if not isinstance(outputs, MixedOutputs):
        raise InvalidInputError("the loss 'joint' needs a mixed classifier; this classifier has no base classifiers")
    std_logits_BK, log_probs_BK = outputs.std_logits.double(), outputs.mapped_logits.log_softmax(dim=1)
    twice_BK = torch.zeros_like(log_probs_BK).scatter(1, targets_B[:, None], math.log(2))
    twice_BK = twice_BK.scatter(1, labels_B[:, None], -torch.inf)
    rob_B = (log_probs_BK + twice_BK).logsumexp(dim=1)
    std_lead_B = at(std_logits_BK, targets_B) - others(std_logits_BK, targets_B).amax(dim=1)
    return rob_B + weights_B * std_lead_B.clamp(max=0)


def anyone(mask: Tensor) -> bool:
    """Return whether any entry is true. On an accelerator, return True at once, because reading the mask would wait."""
    return mask.device.type != "cpu" or bool(mask.any())

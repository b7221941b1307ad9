"""Adversarial losses, one value an image, each to be *maximised*; all invariant to a shift of the logits.

Shapes: B images, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_TINY = 1e-12  # AutoAttack's guard of DLR's denominator; in float32 it never underflows


def ce_loss(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Cross-entropy of each image, in nats, shape (B,)."""
    return F.cross_entropy(logits_BK, labels_B, reduction="none")


def dlr_loss(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Difference of logits ratio (Croce & Hein 2020, eq. 6), shape (B,); without a third logit no denominator."""
    sorted_BK = logits_BK.sort(dim=1).values
    gap_B = _at(logits_BK, labels_B) - _best_other(logits_BK, labels_B)
    if logits_BK.shape[1] < 3:
        return -gap_B
    return -gap_B / (sorted_BK[:, -1] - sorted_BK[:, -3] + _TINY)


def targeted_dlr_loss(logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Targeted DLR (Croce & Hein 2020, eq. 7), shape (B,).

    The denominator needs four classes: with K = 3 it is z_(1) - z_(3), with K = 2 there is none.
    """
    gap_B = _at(logits_BK, labels_B) - _at(logits_BK, targets_B)
    n_classes = logits_BK.shape[1]
    if n_classes < 3:
        return -gap_B
    sorted_BK = logits_BK.sort(dim=1).values
    low_B = sorted_BK[:, -3] if n_classes == 3 else 0.5 * (sorted_BK[:, -3] + sorted_BK[:, -4])
    return -gap_B / (sorted_BK[:, -1] - low_B + _TINY)


def mixed_loss(logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Cross-entropy where `targets_B` is -1, targeted DLR elsewhere: attacks of both kinds in one batch."""
    untargeted_B = targets_B < 0
    if bool(untargeted_B.all()):
        return ce_loss(logits_BK, labels_B)
    targeted_B = targeted_dlr_loss(logits_BK, labels_B, targets_B.clamp(min=0))
    if not bool(untargeted_B.any()):
        return targeted_B
    return torch.where(untargeted_B, ce_loss(logits_BK, labels_B), targeted_B)


def _at(logits_BK: Tensor, index_B: Tensor) -> Tensor:
    return logits_BK.gather(1, index_B[:, None]).squeeze(1)


def _best_other(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return logits_BK.scatter(1, labels_B[:, None], -torch.inf).max(dim=1).values

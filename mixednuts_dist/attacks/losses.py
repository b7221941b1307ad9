"""Adversarial losses, one value an image, each to be *maximised*; all invariant to a shift of the logits.

Shapes: B images, K classes.
"""

import math
from collections.abc import Callable, Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import anyone

LossKind = Literal["ce", "dlr", "margin"]
UNTARGETED, MARGIN = -1, -2  # in place of a target: cross-entropy, the margin itself

_TINY = 1e-12  # AutoAttack's guard of DLR's denominator; in float32 it never underflows


def ce_loss(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Cross-entropy of each image, in nats, shape (B,)."""
    return F.cross_entropy(logits_BK, labels_B, reduction="none")


def dlr_loss(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Difference of logits ratio (Croce & Hein 2020, eq. 6), shape (B,); without a third logit no denominator."""
    sorted_BK = logits_BK.sort(dim=1).values
    gap_B = _at(logits_BK, labels_B) - _others(logits_BK, labels_B).amax(dim=1)
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


def margin_loss(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """`log(1 - (p_y - max_{j != y} p_j))`, shape (B,), as a difference of two logsumexp: it does not saturate.

    1 - p_y is the sum of the other classes' probabilities, so the best of them counts twice.
    """
    others_BK = _others(logits_BK, labels_B)
    twice_BK = F.one_hot(others_BK.argmax(dim=1), logits_BK.shape[1]).to(logits_BK) * math.log(2)
    return (others_BK + twice_BK).logsumexp(dim=1) - logits_BK.logsumexp(dim=1)


def mixed_loss(
    logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor, kinds: Collection[LossKind] = ("ce", "dlr", "margin")
) -> Tensor:
    """Targeted DLR where `targets_B` is a class, else cross-entropy (`UNTARGETED`) or the margin (`MARGIN`).

    `kinds` are those that can occur, where the caller knows: an accelerator is not asked.
    """
    losses: dict[LossKind, Callable[[], Tensor]] = {
        "ce": lambda: ce_loss(logits_BK, labels_B),
        "dlr": lambda: targeted_dlr_loss(logits_BK, labels_B, targets_B.clamp(min=0)),
        "margin": lambda: margin_loss(logits_BK, labels_B),
    }
    masks = {"ce": targets_B == UNTARGETED, "dlr": targets_B >= 0, "margin": targets_B == MARGIN}
    present = [kind for kind in losses if kind in kinds and anyone(masks[kind])]
    total_B = losses[present[0]]()
    for kind in present[1:]:
        total_B = torch.where(masks[kind], losses[kind](), total_B)
    return total_B


def _at(logits_BK: Tensor, index_B: Tensor) -> Tensor:
    return logits_BK.gather(1, index_B[:, None]).squeeze(1)


def _others(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return logits_BK.scatter(1, labels_B[:, None], -torch.inf)

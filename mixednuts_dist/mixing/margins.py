"""Confidence margins (paper, definition 3.1), plain and as `log(1 - margin)`.

Margins near 1 saturate: in float32 at 1 - 6e-8, in float64 at 1 - 1e-16. `log(1 - margin)` does not, so whatever
compares margins (attacks, Algorithm 1) compares that; the smaller it is, the larger the margin.

Shapes: B images, K >= 2 classes. NaN in gives NaN out: these functions run inside attacks, where a check would make the
accelerator wait.
"""

import torch
from torch import Tensor

from ..errors import InvalidInputError


def signed_margin(probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    """`p_y - max_{j != y} p_j` of each image, shape (B,), in the dtype of `probs_BK`; negative where fooled."""
    _require_classes(probs_BK)
    return _at(probs_BK, labels_B) - _without(probs_BK, labels_B).amax(dim=1)


def top2_margin(probs_BK: Tensor) -> Tensor:
    """`p_(1) - p_(2)` of each image, shape (B,), never negative, in the dtype of `probs_BK`."""
    _require_classes(probs_BK)
    top_B2 = probs_BK.topk(2, dim=1).values
    return top_B2[:, 0] - top_B2[:, 1]


def log_one_minus_signed_margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """`log(1 - signed_margin(softmax(logits), labels))`, shape (B,), float64, without cancellation.

    `1 - p_y + max_{j != y} p_j` is a sum of positive terms only, `sum_{j != y} p_j + max_{j != y} p_j`. The result lies
    in (-inf, log 2], is 0 where y ties with its best rival and positive where the image is broken.
    """
    _require_classes(logits_BK)
    shifted_BK = _shifted(logits_BK)
    others_BK = _without(shifted_BK, labels_B)
    numerator_B = torch.logaddexp(others_BK.logsumexp(dim=1), others_BK.amax(dim=1))
    return numerator_B - shifted_BK.logsumexp(dim=1)


def log_one_minus_top2_margin(logits_BK: Tensor) -> Tensor:
    """`log(1 - top2_margin(softmax(logits)))`, shape (B,), float64, in (-inf, 0], without cancellation."""
    _require_classes(logits_BK)
    return log_one_minus_signed_margin(logits_BK, logits_BK.argmax(dim=1))


def log_one_minus_gap(logits_BK: Tensor, winners_B: Tensor, rivals_B: Tensor) -> Tensor:
    """`log(1 - (p_winner - p_rival))`, shape (B,), float64; exactly 0 where winner and rival are the same class."""
    _require_classes(logits_BK)
    shifted_BK = _shifted(logits_BK)
    others_B = _without(shifted_BK, winners_B).logsumexp(dim=1)
    gap_B = torch.logaddexp(others_B, _at(shifted_BK, rivals_B)) - shifted_BK.logsumexp(dim=1)
    return torch.where(winners_B == rivals_B, 0.0, gap_B)


def _shifted(logits_BK: Tensor) -> Tensor:
    """Logits in float64 with a maximum of 0: small differences of large logits keep their digits."""
    logits_BK = logits_BK.double()
    return logits_BK - logits_BK.amax(dim=1, keepdim=True)


def _at(values_BK: Tensor, index_B: Tensor) -> Tensor:
    return values_BK.gather(1, index_B[:, None]).squeeze(1)


def _without(values_BK: Tensor, index_B: Tensor) -> Tensor:
    return values_BK.scatter(1, index_B[:, None], -torch.inf)


def _require_classes(values_BK: Tensor) -> None:
    if values_BK.ndim != 2 or values_BK.shape[1] < 2:
        raise InvalidInputError(
            f"a margin needs scores of shape (images, classes) with at least 2 classes, got {tuple(values_BK.shape)}"
        )

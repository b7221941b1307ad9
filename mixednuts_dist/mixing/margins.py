"""Confidence margins (paper, definition 3.1), plain and as `log(1 - margin)`.

Margins near 1 saturate: in float32 at 1 - 6e-8, in float64 at 1 - 1e-16. `log(1 - margin)` does not saturate, and near
0 it keeps the digits of the margin. Attacks and Algorithm 1 therefore compare margins by `log(1 - margin)`, which is
smaller for a larger margin.

Shapes: B images, K >= 2 classes. NaN logits give NaN margins. The functions do not check for NaN, because they run
inside attacks, and a check would make the accelerator wait.
"""

import math

import torch
from torch import Tensor

from ..errors import InvalidInputError

_LARGEST = 600.0  # exp of it is finite in float64


def signed_margin(probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return `p_y - max_{j != y} p_j`, (B,), in the dtype of `probs_BK`; negative if the image is misclassified.

    >>> signed_margin(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([1])).tolist()
    [-0.25]
    """
    _require_classes("probs", probs_BK)
    return at(probs_BK, labels_B) - others(probs_BK, labels_B).amax(dim=1)


def top2_margin(probs_BK: Tensor) -> Tensor:
    """Return `p_(1) - p_(2)`, (B,), never negative, in the dtype of `probs_BK`.

    >>> top2_margin(torch.tensor([[0.5, 0.25, 0.25]])).tolist()
    [0.25]
    """
    _require_classes("probs", probs_BK)
    top_B2 = probs_BK.topk(2, dim=1).values
    return top_B2[:, 0] - top_B2[:, 1]


def log_one_minus_signed_margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return `log(1 - signed_margin(softmax(logits), labels))`, (B,), float64, without cancellation.

    The result is in (-inf, log 2]. It is 0 if y ties with its best rival, and positive if the image is broken.
    """
    return _log_one_minus_margin(logits_BK, labels_B, None)


def log_one_minus_top2_margin(logits_BK: Tensor) -> Tensor:
    """Return `log(1 - top2_margin(softmax(logits)))`, (B,), float64, in (-inf, 0], without cancellation."""
    return log_one_minus_signed_margin(logits_BK, logits_BK.argmax(dim=1))


def log_one_minus_lead(logits_BK: Tensor, winners_B: Tensor, rivals_B: Tensor) -> Tensor:
    """Return `log(1 - (p_winner - p_rival))`, (B,), float64; exactly 0 if winner and rival are the same class."""
    return torch.where(winners_B == rivals_B, 0.0, _log_one_minus_margin(logits_BK, winners_B, rivals_B))


def _log_one_minus_margin(logits_BK: Tensor, winners_B: Tensor, rivals_B: Tensor | None) -> Tensor:
    """Return `log(1 - (p_winner - p_rival))`; by default the rival is the best class except the winner."""
    _require_classes("logits", logits_BK)
    logits_BK = logits_BK.double()
    others_BK = others(logits_BK, winners_B)
    best_B = others_BK.amax(dim=1)
    rest_B = (others_BK - best_B[:, None]).exp().sum(dim=1)
    behind_B = torch.zeros_like(best_B) if rivals_B is None else at(logits_BK, rivals_B) - best_B
    return log_one_minus_lead_from_parts(rest_B, at(logits_BK, winners_B) - best_B, behind_B)


def log_one_minus_lead_from_parts(rest: Tensor, lead: Tensor, behind: Tensor) -> Tensor:
    """Return `log(1 - (p_a - p_b))` from logits relative to the best class other than a.

    Let `m = (e^lead - e^behind) / (rest + e^lead)`. If m is small, it is computed without cancellation, and the result
    is `log1p(-m)`. If m is large, the result follows from `1 - m = (rest + e^behind) / (rest + e^lead)`, in which all
    terms are positive. All terms are finite.

    Args:
        rest: `sum_{j != a} exp(z_j - z_best)`, at least 1.
        lead: `z_a - z_best`, of any size and sign.
        behind: `z_b - z_best`, at most 0 unless b = a.
    """
    exp_lead, exp_behind, distance = lead.clamp_max(_LARGEST).exp(), behind.exp(), lead - behind
    difference = torch.where(distance < 1, exp_behind * distance.clamp_max(1).expm1(), exp_lead - exp_behind)
    margin = difference / (rest + exp_lead)
    large = (rest + exp_behind).log() - torch.logaddexp(rest.log(), lead)
    return torch.where(margin < 0.5, torch.log1p(-margin), large)


def at(values_BK: Tensor, index_B: Tensor) -> Tensor:
    """Return the value of one class per image, (B,)."""
    return values_BK.gather(1, index_B[:, None]).squeeze(1)


def others(values_BK: Tensor, index_B: Tensor) -> Tensor:
    """Return the values with those of one class per image at minus infinity."""
    return values_BK.scatter(1, index_B[:, None], -torch.inf)


def _require_classes(name: str, values_BK: Tensor) -> None:
    if values_BK.ndim != 2 or values_BK.shape[1] < 2:
        raise InvalidInputError(
            f"{name} must have the shape (images, classes) with at least 2 classes, got {tuple(values_BK.shape)}"
        )


def require_logits(name: str, logits_BK: Tensor) -> None:
    """Raise InvalidInputError unless `logits_BK` is a finite table of at least 2 classes."""
    _require_classes(name, logits_BK)
    if math.isfinite(logits_BK.sum(dtype=torch.float64)):
        return
    bad_B = ~torch.isfinite(logits_BK).all(dim=1)
    if bool(bad_B.any()):
        raise InvalidInputError(
            f"{name} is not finite (NaN or infinite) in {int(bad_B.sum())} of {len(bad_B)} rows, "
            f"the first is row {int(bad_B.nonzero()[0])}"
        )


def class_indices(name: str, index_B: Tensor, logits_BK: Tensor) -> Tensor:
    """Return `index_B` as int64 on the device of `logits_BK`.

    Raises:
        InvalidInputError: unless there is one class index in [0, K) for each row.
    """
    n_images, n_classes = logits_BK.shape
    if index_B.shape != (n_images,):
        raise InvalidInputError(f"{name} has shape {tuple(index_B.shape)}, expected ({n_images},): one class per image")
    index_B = index_B.to(device=logits_BK.device, dtype=torch.int64)
    if n_images and not 0 <= int(index_B.min()) <= int(index_B.max()) < n_classes:
        raise InvalidInputError(
            f"{name} spans {int(index_B.min())} to {int(index_B.max())}, the logits have K={n_classes} classes"
        )
    return index_B

"""What Algorithm 1 reads: the cached logits of a run, checked, and LayerNormed once for all candidates.

Shapes: B images, K classes, P attacked points.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, clamp_shape
from ..mixing.margins import require_logits
from ..mixing.transforms import norm_statistics, resolve_ln_k
from .kernel import sort_rows


@dataclass(frozen=True)
class CachedLogits:
    """Everything that a search and its predictions are made from; one row an image, clean and attacked alike."""

    rob_clean_BK: Tensor
    rob_attacked_BK: Tensor
    labels_B: Tensor
    std_pred_B: Tensor  # std's classes of the clean images


def normed_logits(
    name: str, logits_BK: Tensor, *, clamp: Clamp, ln_k: int | None, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`logits_BK` in float64 after LayerNorm, and the same with each row in descending order.

    `like` has the number of classes and the device to agree with.

    Raises:
        InvalidInputError: for logits that are no (images, classes) table of at least 2 classes or that are not finite.
    """
    clamp_shape(clamp)
    require_logits(name, logits_BK)
    if like is not None:
        if logits_BK.shape[1] != like.shape[1]:
            raise InvalidInputError(f"{name} has K={logits_BK.shape[1]} classes, the others have K={like.shape[1]}")
        logits_BK = logits_BK.to(like.device)
    width = resolve_ln_k(ln_k, logits_BK.shape[1])
    logits_BK = logits_BK.detach()
    sortable_BK = logits_BK if logits_BK.dtype == torch.float32 else logits_BK.double()
    descending_BK = sort_rows(sortable_BK).flip(-1).double()
    mean_B1, deviation_B1 = norm_statistics(descending_BK[:, :width])
    return (logits_BK.double() - mean_B1) / deviation_B1, (descending_BK - mean_B1) / deviation_B1

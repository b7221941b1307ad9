"""The inputs of Algorithm 1: a run's stored logits, checked, and LayerNormed once for all candidates.

Shapes: B images, K classes, P attacked points.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, clamp_shape
from ..mixing.margins import require_logits
from ..mixing.transforms import norm_statistics, resolve_ln_k
from .kernel import sort_rows


@dataclass(frozen=True)
class AttackedPoints:
    """Further attacked points of images, beside the first one of each: found by attacks on a mixture.

    An image's margin under a candidate is the smallest over all its points. A point's margin is the signed margin of
    M(rob), which holds whatever class std has there. Where `std_pred_P` is given and rob is right, it is the lead of
    the label over std's class at that point.
    """

    rob_logits_PK: Tensor  # rob's raw logits
    image_P: Tensor  # int64: the row of the point's image in the tables of one row an image
    std_pred_P: Tensor | None = None  # int64: std's classes at the points

    def __len__(self) -> int:
        return len(self.image_P)

    def of_images(self, mask_B: Tensor) -> "AttackedPoints":
        """The points of the images where `mask_B` is true, with rows counted among those images."""
        mask_B = mask_B.to(self.image_P.device)
        mine_P = mask_B[self.image_P]
        row_B = mask_B.long().cumsum(0) - 1
        std_pred_P = None if self.std_pred_P is None else self.std_pred_P[mine_P]
        return AttackedPoints(self.rob_logits_PK[mine_P], row_B[self.image_P[mine_P]], std_pred_P)


@dataclass(frozen=True)
class Certificates:
    """What is certified for each image at one radius; no (s, p, c) changes it."""

    held_B: Tensor  # bool, the images on which the robust classifier alone is certified; there are n
    shares_BK: Tensor  # votes under noise, which the smoothed mixture mixes instead of softmax(M(rob))
    log_gaps_n: Tensor  # log(1 - certified margin) of those images


@dataclass(frozen=True)
class CachedLogits:
    """All inputs of a search and of its predictions; row i of every table is image i."""

    rob_clean_BK: Tensor
    rob_attacked_BK: Tensor
    labels_B: Tensor
    std_pred_B: Tensor  # std's classes of the clean images
    points: AttackedPoints | None = None  # further attacked images; `image_P` are rows of these tables
    certificates: Certificates | None = None


@dataclass(frozen=True)
class Owners:
    """The image of each row of attacked points, in an order in which a maximum over points takes few operations.

    The rows are in layers: the first point of every image, in the images' order; then the second points of the images
    that have one; and so on. A layer has at most one point of an image.
    """

    n_images: int
    image_M: Tensor  # int64, the image of each row
    starts: tuple[int, ...]  # where the second and every further layer begins

    @classmethod
    def of(cls, n_images: int, image_P: Tensor) -> tuple[Self, Tensor]:
        """The owners of one point an image and further points of `image_P`, and the order to sort the further ones."""
        by_image_P = image_P.argsort(stable=True)
        sorted_P = image_P[by_image_P]
        first_P = torch.searchsorted(sorted_P, sorted_P)  # where the points of the same image begin
        layer_P = torch.arange(len(image_P), device=image_P.device) - first_P
        order_P = by_image_P[layer_P.argsort(stable=True)]
        sizes = torch.bincount(layer_P).tolist() if len(image_P) else []
        starts = tuple(n_images + sum(sizes[:i]) for i in range(len(sizes)))
        image_M = torch.cat([torch.arange(n_images, device=image_P.device), image_P[order_P]])
        return cls(n_images, image_M, starts), order_P

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each image's values, last axis M -> n."""
        largest = values[..., : self.n_images]
        if self.starts:
            largest = largest.clone()
        for start, stop in zip(self.starts, (*self.starts[1:], values.shape[-1]), strict=False):
            image_L = self.image_M[start:stop]
            largest[..., image_L] = torch.maximum(largest[..., image_L], values[..., start:stop])
        return largest


def normed_logits(
    name: str, logits_BK: Tensor, *, clamp: Clamp, ln_k: int | None, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`logits_BK` in float64 after LayerNorm, and the same with each row in descending order.

    The number of classes must be that of `like`, and the result is on its device.

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

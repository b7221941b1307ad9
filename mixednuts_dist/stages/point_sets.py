"""The exact criterion over sets of attacked points: an image's margin is the smallest over its points.

Shapes: N images, P points, S scales, K classes; `Q` powers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..mixing.transforms import Clamp
from ..selection.criteria import ExactCriterion, ExactMeasurement, Images
from ..selection.selection import exact_criterion
from ..selection.selection_kernel import Duels, Slab, Standing, log_one_minus_gaps
from .rounds import Points


@dataclass(frozen=True)
class PointImages(Images):
    """Points that count by their images."""

    image_P: Tensor
    lost_P: Tensor  # rob itself is wrong there
    n_images: int

    def __len__(self) -> int:
        return self.n_images


@dataclass(frozen=True)
class PointsCriterion(ExactCriterion):
    """`ExactCriterion` whose constraint counts each image once, by the smallest margin over its points."""

    def measure(self, slab: Slab, kept: Sequence[int]) -> ExactMeasurement:  # noqa: ARG002
        points = self.attacked
        assert isinstance(points, PointImages)
        right = Duels(
            points.descending_NK,
            _no_row(points.descending_NK),
            torch.full_like(points.image_P, torch.nan, dtype=torch.float64),
        )
        gaps_QSP = _gaps(right, slab).masked_fill(points.lost_P, 2.0)
        worst_QSN = gaps_QSP.new_full((*gaps_QSP.shape[:2], points.n_images), -torch.inf)
        worst_QSN.scatter_reduce_(2, points.image_P.expand(gaps_QSP.shape), gaps_QSP, "amax")
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N
        clean = Duels(self.clean.descending_NK[open_N], flipped_N[open_N], self.std_logits_N[open_N])
        n_both = int((rob_right_N & std_right_N).sum())
        return ExactMeasurement(worst_QSN, _gaps(clean, slab), rob_right_N[open_N], n_both)


def _gaps(duels: Duels, slab: Slab) -> Tensor:
    shape = len(slab.powers), len(slab.scales), len(duels)
    entries = torch.arange(shape[0] * shape[1] * shape[2])
    return log_one_minus_gaps(duels, slab, Standing.of(duels, slab), entries).reshape(shape)


def _no_row(values_NK: Tensor) -> Tensor:
    return torch.zeros(len(values_NK), dtype=torch.bool)


def points_criterion(
    points: Points,
    labels_N: Tensor,
    clean_NK: Tensor,
    std_pred_N: Tensor,
    robust_N: Tensor,
    *,
    clamp: Clamp,
    ln_k: int | None,
) -> PointsCriterion:
    """The criterion over the images that rob keeps, and all points known of them."""
    counted_P = robust_N[points.image_P]
    rob_PK, image_P = points.rob_PK[counted_P], points.image_P[counted_P]
    labels_P = rob_PK.argmax(dim=1)  # so that no point is left out; those where it is wrong are marked instead
    plain = exact_criterion(rob_PK, labels_P, clean_NK, labels_N, std_pred_N, clamp=clamp, ln_k=ln_k)
    place_N = robust_N.cumsum(0) - 1
    images = PointImages(
        plain.attacked.descending_NK, place_N[image_P], labels_P != labels_N[image_P], int(robust_N.sum())
    )
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return PointsCriterion(**{**values, "attacked": images})

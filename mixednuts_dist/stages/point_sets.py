"""The exact criterion over sets of attacked points: an image's margin is the smallest over its points.

Shapes: N images, P points, S scales, Q powers, b betas, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..mixing.clamps import Clamp
from ..selection.criteria import ExactCriterion, Scores, order_statistics
from ..selection.inputs import CachedLogits
from ..selection.kernel import Duels, Slab, Standing, log_one_minus_gaps
from .rounds import Points

_LOST = 2.0  # stands for log(1 - margin) where rob itself is wrong: above every cutoff


@dataclass(frozen=True, kw_only=True)
class PointsCriterion(ExactCriterion):
    """`ExactCriterion` whose constraint counts each image once, by the smallest margin over its points."""

    image_P: Tensor
    lost_P: Tensor  # rob itself is wrong there
    n_images: int

    @property
    def n_attacked(self) -> int:
        return self.n_images

    def score(self, slab: Slab, kept: Sequence[int]) -> Scores:
        descending_PK = self.attacked.descending_NK
        no_rival_P = torch.full_like(descending_PK[:, 0], torch.nan)
        unflipped_P = torch.zeros(len(descending_PK), dtype=torch.bool)
        gaps_QSP = _gaps(Duels(descending_PK, unflipped_P, no_rival_P), slab).masked_fill(self.lost_P, _LOST)
        worst_QSN = gaps_QSP.new_full((*gaps_QSP.shape[:2], self.n_images), -torch.inf)
        worst_QSN.scatter_reduce_(2, self.image_P.expand(gaps_QSP.shape), gaps_QSP, "amax")
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N
        open_QSN = _gaps(Duels(self.clean.descending_NK[open_N], flipped_N[open_N], self.std_logits_N[open_N]), slab)
        cutoffs_bQS = order_statistics(worst_QSN, kept)
        counts = [((open_QSN < cutoff[..., None]) == rob_right_N[open_N]).sum(dim=-1) for cutoff in cutoffs_bQS]
        reached = [(worst_QSN <= cutoff[..., None]).sum(dim=-1) for cutoff in cutoffs_bQS]
        n_both = int((rob_right_N & std_right_N).sum())
        return Scores(cutoffs_bQS, torch.stack(counts) + n_both, torch.stack(reached))


def _gaps(duels: Duels, slab: Slab) -> Tensor:
    """log(1 - gap) of every row, exact, (Q, S, rows)."""
    shape = len(slab.powers), len(slab.scales), len(duels)
    entries = torch.arange(shape[0] * shape[1] * shape[2])
    return log_one_minus_gaps(duels, slab, Standing.of(duels, slab), entries).reshape(shape)


def points_criterion(points: Points, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> PointsCriterion:
    """The criterion over the images that rob keeps at the attack stage's points, and all points known of them."""
    robust_N = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
    counted_P = robust_N[points.image_P]
    rob_PK, image_P = points.rob_PK[counted_P], points.image_P[counted_P]
    labels_P = rob_PK.argmax(dim=1)  # so that no point is left out; those where it is wrong are marked instead
    plain = ExactCriterion.of(
        rob_PK, labels_P, rows.rob_clean_BK, rows.labels_B, rows.std_pred_B, clamp=clamp, ln_k=ln_k
    )
    values: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return PointsCriterion(
        **values,
        image_P=(robust_N.cumsum(0) - 1)[image_P],
        lost_P=labels_P != rows.labels_B[image_P],
        n_images=int(robust_N.sum()),
    )

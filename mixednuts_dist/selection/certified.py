"""The criterion `certified`: margins under attack are replaced by certified margins.

`beta` is the share of the images certified for the robust classifier alone on which the mixed classifier stays
certified. Votes under noise are classes of the robust classifier, so s, p and c do not change them: alpha alone has the
most correct clean images of the smoothed classifier, and s, p and c keep most of the attacked images at that alpha.

Shapes: B images, n of them certified for the robust classifier, E clean rows that are counted, P powers, S scales,
b betas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from ..config.register import CRITERIA
from ..errors import InvalidInputError
from ..mixing.clamps import Clamp
from .criteria import ExactCriterion, Scores, best_thresholds
from .inputs import CachedLogits, Certificates
from .kernel import Slab

_STRICTLY = 1e-9  # of 1 - margin: a margin has to be above the threshold, not at it


@CRITERIA(
    "certified",
    describes="certified margins instead of attacked ones; needs the key `certify` and its radius",
    order=3,
    stage="certify",
)
@dataclass(frozen=True)
class CertifiedCriterion(ExactCriterion):
    """`exact`, with the constraint on the images on which the robust classifier alone is certified."""

    certificates: Certificates | None = None
    name: ClassVar[str] = "certified"
    compared_with: ClassVar[str | None] = None

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        if rows.certificates is None:
            raise InvalidInputError("the criterion certified reads certificates; these rows have none. Use exact")
        if not bool(rows.certificates.held_B.any()):
            raise InvalidInputError(
                "the robust classifier is certified on no image, so there is nothing to keep: certify at a "
                "smaller radius (certify.radius), or search by attacked margins (search.criterion: exact)"
            )
        return replace(super().from_rows(rows, clamp=clamp, ln_k=ln_k), certificates=rows.certificates)

    @property
    def held(self) -> Certificates:
        """The certificates."""
        assert self.certificates is not None
        return self.certificates

    @property
    def n_attacked(self) -> int:
        """Images of the constraint: those on which the robust classifier alone is certified."""
        return int(self.held.held_B.sum())

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        attacked_PSn, _ = self._log_gaps(self._gap_rows(slab)[0], slab)
        shares_BK, std_right_B = self.held.shares_BK, self.std_pred_N == self.clean_labels_N
        rob_right_B = shares_BK.argmax(dim=1) == self.clean_labels_N
        open_B = rob_right_B ^ std_right_B  # exactly one of the two is correct
        leads_B = shares_BK.amax(dim=1) - shares_BK.gather(1, self.std_pred_N[:, None]).squeeze(1)
        candidates = len(slab.powers), len(slab.scales), -1
        certified_PSn = self.held.log_gaps_n.expand(*candidates) + _STRICTLY
        log_cutoffs, gained, _ = best_thresholds(
            certified_PSn, torch.log1p(-leads_B[open_B]).expand(*candidates), rob_right_B[open_B], kept
        )
        n_kept = (attacked_PSn <= log_cutoffs[..., None]).sum(dim=-1)
        return Scores(log_cutoffs, gained + int(std_right_B.sum()), n_kept)

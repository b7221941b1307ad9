"""The criterion `certified`: what is certified of rob takes the place of what an attack left of it.

Of each image that rob alone is certified on, a certified margin takes the place of the smallest one under attack. The
grid, cutoffs and ties are the search's own: for each beta, the share of those images that the mixture stays certified
on, the s, p, c and alpha with the most clean images, and among equals what keeps most of the attacked ones.

The votes are classes of the robust classifier under noise, so s, p and c do not change them. Alpha alone is searched,
the clean images are those of the smoothed mixture, and s, p and c keep most of the attacked images at that alpha.

Shapes: B images, n of them certified for rob, E clean rows that are counted, P powers, S scales, b betas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..config.register import CRITERIA
from ..errors import InvalidInputError
from ..mixing.clamps import Clamp
from .criteria import ExactCriterion, Scores, best_cutoffs
from .inputs import CachedLogits, Certificates
from .kernel import Slab

_STRICTLY = 1e-9  # of 1 - margin: a margin has to be above the cutoff, not at it


@CRITERIA(
    "certified",
    describes="certified margins instead of attacked ones; needs the key `certify` and its radius",
    order=3,
    stage="certify",
)
@dataclass(frozen=True)
class CertifiedCriterion(ExactCriterion):
    """`exact`, with the constraint on the images that rob alone is certified on."""

    certificates: Certificates | None = None
    name: ClassVar[str] = "certified"
    meaning: ClassVar[str] = "clean accuracy of the mixture"
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
        """Images of the constraint: those that rob alone is certified on."""
        return int(self.held.held_B.sum())

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        gap_rows, _ = self._gap_rows(slab)
        attacked_PSn, _ = self._log_gaps(gap_rows, slab)
        open_E, gains_E = self._of_votes()
        candidates = len(slab.powers), len(slab.scales), -1
        open_PSE = open_E.expand(*candidates)
        certified_PSn = self.held.log_gaps_n.expand(*candidates) + _STRICTLY
        log_cutoffs, gained, _ = best_cutoffs(certified_PSn, open_PSE, gains_E, kept)
        n_kept = (attacked_PSn <= log_cutoffs[..., None]).sum(dim=-1)
        return Scores(log_cutoffs, gained + int((self.std_pred_N == self.clean_labels_N).sum()), n_kept)

    def _of_votes(self) -> tuple[Tensor, Tensor]:
        """Return log(1 - lead over std's class) where exactly one of rob and std is correct, and the gain or loss."""
        shares_BK = self.held.shares_BK
        top_B = shares_BK.argmax(dim=1)
        rob_right_B, std_right_B = top_B == self.clean_labels_N, self.std_pred_N == self.clean_labels_N
        open_B = rob_right_B ^ std_right_B
        leads_B = shares_BK.amax(dim=1) - shares_BK.gather(1, self.std_pred_N[:, None]).squeeze(1)
        return torch.log1p(-leads_B[open_B]), torch.where(rob_right_B[open_B], 1, -1)

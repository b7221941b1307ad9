"""The search's criterion with certified margins in place of attacked ones, for what bounds have stored.

Of each image that rob alone is certified on, the least margin of softmax(M(logits)) over the bounds of its logits takes
the place of the smallest one under attack. Cutoffs, ties and the grid are the search's own: for each beta, the share of
those images that the mixture stays certified on, the s, p, c and alpha with the most clean images.

Votes under noise have no such choice: M keeps rob's class, so hard votes do not depend on s, p and c, and alpha alone
is left, which the table over beta answers.

Shapes: N images, n of them certified for rob, P powers, S scales.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..mixing.boxes import LogitBox, map_leads
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.transforms import LogitTransform
from ..selection.criteria import ExactCriterion
from ..selection.grid import Grid
from ..selection.kernel import GapRows, Slab
from ..selection.selection import Selection, search_grid
from .answers import ROB_ALONE, BoundedAnswers

_STRICTLY = 1e-9  # of 1 - margin: a margin has to be above the cutoff, not at it


@dataclass(frozen=True)
class CertifiedCriterion(ExactCriterion):
    """`exact` with `attacked` the images that rob alone is certified on, and their certified margins."""

    box: LogitBox | None = None  # of these images
    labels_n: Tensor | None = None
    ln_k: int | None = None

    def _log_gaps(self, rows: GapRows, slab: Slab) -> tuple[Tensor, Tensor]:
        """Replaces log(1 - gap) of the images of the constraint, (P, S, n), by that of their certified margins."""
        assert self.box is not None
        assert self.labels_n is not None
        _, open_PSN = super()._log_gaps(rows, slab)
        by_power = []
        for power in slab.powers:
            leads_nK = map_leads(LogitTransform(1.0, power, slab.bias, slab.clamp, self.ln_k), self.box, self.labels_n)
            behind_nK = (-leads_nK).scatter(1, self.labels_n[:, None], 0.0)
            by_scale = [log_one_minus_signed_margin(scale * behind_nK, self.labels_n) for scale in slab.scales]
            by_power.append(torch.stack(by_scale))
        return torch.stack(by_power) + _STRICTLY, open_PSN


def certified_selection(answers: BoundedAnswers, radius: float, grid: Grid) -> Selection:
    """The grid's choice for every beta, by what is certified at the radius.

    Raises:
        InvalidInputError: where rob alone is certified on no image, or no candidate is feasible.
    """
    held_N = answers.certified(ROB_ALONE, radius)
    box, labels_N, clean_NK = answers.box(radius), answers.labels_N, answers.rob_clean_NK
    std_pred_N = clean_NK.argmax(dim=1) if answers.std_pred_N is None else answers.std_pred_N
    criterion = CertifiedCriterion.of(
        clean_NK[held_N], labels_N[held_N], clean_NK, labels_N, std_pred_N, clamp=grid.clamp, ln_k=grid.ln_k
    )
    held = LogitBox(box.lower_BK[held_N], box.upper_BK[held_N], box.leads_BK[held_N]).double()
    return search_grid(replace(criterion, box=held, labels_n=labels_N[held_N], ln_k=grid.ln_k), grid)

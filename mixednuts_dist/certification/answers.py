"""What stored rows of the certify stage say of any mixture: which images it gets right, and which it certifiably keeps.

The rows answer for every alpha and radius; no network pass is needed.

Shapes: N images, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform
from ..selection.inputs import Certificates
from .certificates import certified_radius, smoothed_margin
from .smoothing import SmoothingPlan

ROB_ALONE = Mixture(IdentityTransform(), 1.0, 0.0)


@dataclass(frozen=True)
class SmoothedAnswers:
    """From votes under noise: of the smoothed mixture `(1 - a) onehot(std) + a qbar`, in L2."""

    plan: SmoothingPlan
    labels_N: Tensor
    std_pred_N: Tensor | None  # None: rob alone
    chosen_counts_NK: Tensor
    counts_NK: Tensor
    n_drawn_N: Tensor

    def votes(self) -> Tensor:
        """Lower bounds of the chosen class's vote, (N,), float64; with the plan's confidence each."""
        hits_N = self.counts_NK.gather(1, self._classes()[:, None]).squeeze(1)
        return self.plan.looks.lower_bounds(hits_N, self.n_drawn_N)

    def clean(self, mixture: Mixture) -> Tensor:
        """By the shares of all draws, which is how `SmoothedMixture` predicts."""
        counts_NK = (self.chosen_counts_NK + self.counts_NK).double()
        mixed_NK = mixture.alpha * counts_NK / counts_NK.sum(dim=1, keepdim=True)
        if self.std_pred_N is not None:
            vote_N1 = torch.full_like(mixed_NK[:, :1], mixture.one_minus_alpha)
            mixed_NK = mixed_NK.scatter_add(1, self.std_pred_N[:, None], vote_N1)
        right_N: Tensor = mixed_NK.argmax(dim=1) == self.labels_N
        return right_N

    def radii(self, mixture: Mixture) -> Tensor:
        """Certified radii, (N,); -inf where the chosen class is not the label."""
        radii_N = certified_radius(self.votes(), sigma=self.plan.sigma, alpha=mixture.alpha)
        return torch.where(self._classes() == self.labels_N, radii_N, -torch.inf)

    def reach(self, mixture: Mixture) -> Tensor:
        return self.radii(mixture).clamp_min(0)

    def certified(self, mixture: Mixture, radius: float) -> Tensor:
        certified_N: Tensor = self.radii(mixture) > radius
        return certified_N

    def certificates(self, radius: float, sample_ids: Sequence[int] | None = None) -> Certificates:
        """Step 2 of `mixing/certificates.py` with `p_B = 1 - p_A`: the margin is the same under every candidate."""
        votes_N = self.votes()
        margins_N = smoothed_margin(votes_N, 1 - votes_N, radius / self.plan.sigma)
        counts_NK = (self.chosen_counts_NK + self.counts_NK).double()
        at = slice(None) if sample_ids is None else torch.as_tensor(sample_ids)
        held_N, shares_NK = self.certified(ROB_ALONE, radius)[at], counts_NK / counts_NK.sum(dim=1, keepdim=True)
        return Certificates(held_N, shares_NK[at], torch.log1p(-margins_N[at][held_N]))

    def _classes(self) -> Tensor:
        return self.chosen_counts_NK.argmax(dim=1)

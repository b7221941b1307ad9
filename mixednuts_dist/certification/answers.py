"""Certified and correct images of any smoothed mixed classifier, from the stored votes of the certify stage.

One set of stored votes gives the results for every alpha and radius, without another pass of a network.

Shapes: N images, K classes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform
from .certificates import certified_radius
from .smoothing import SmoothingPlan, settled_classes

ROB_ALONE = Mixture(IdentityTransform(), 1.0, 0.0)


@dataclass(frozen=True)
class SmoothedAnswers:
    """The stored votes of the robust classifier and predicted classes of the standard classifier."""

    plan: SmoothingPlan
    labels_N: Tensor
    std_pred_N: Tensor | None  # None: the robust classifier alone
    chosen_counts_NK: Tensor
    counts_NK: Tensor
    n_drawn_N: Tensor

    @cached_property
    def classes_N(self) -> Tensor:  # noqa: N802
        """The class with the most votes among the draws that choose, (N,)."""
        return self.chosen_counts_NK.argmax(dim=1)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """p_A and p_B of the chosen class of each image, each (N,) float64; both hold simultaneously."""
        return self.plan.looks.vote_bounds(self.counts_NK, self.classes_N, self.n_drawn_N)

    @cached_property
    def shares_NK(self) -> Tensor:  # noqa: N802
        """The share of each class among all draws, (N, K) float64."""
        counts_NK = (self.chosen_counts_NK + self.counts_NK).double()
        return counts_NK / counts_NK.sum(dim=1, keepdim=True)

    def clean(self, mixture: Mixture) -> Tensor:
        """Return which images are correct if the shares of the draws are exact, (N,) bool: an estimate, not a bound."""
        mixed_NK = mixture.one_minus_alpha * self._std_NK() + mixture.alpha * self.shares_NK
        right_N: Tensor = mixed_NK.argmax(dim=1) == self.labels_N
        return right_N

    def predicted(self, mixture: Mixture) -> Tensor:
        """Return which images the smoothed classifier predicts correctly, (N,) bool; an abstention is an error."""
        counts = self.chosen_counts_NK, self.counts_NK, self.n_drawn_N
        classes_N = settled_classes(self._std_NK(), *counts, self.plan.looks, mixture)
        right_N: Tensor = classes_N == self.labels_N
        return right_N

    def reach(self, mixture: Mixture) -> Tensor:
        """Return the radius up to which the label of each image is certified, (N,) float64; 0 for none."""
        if mixture.alpha <= 0.5:  # the standard classifier alone may decide
            return torch.zeros(len(self.labels_N), dtype=torch.float64)
        p_top_N, p_second_N = self.bounds
        radii_N = certified_radius(p_top_N, sigma=self.plan.sigma, alpha=mixture.alpha, p_second_B=p_second_N)
        return torch.where(self.classes_N == self.labels_N, radii_N.clamp_min(0), 0.0)

    def certified(self, mixture: Mixture, radius: float) -> Tensor:
        """Return which images are certified at a radius, (N,) bool."""
        certified_N: Tensor = self.reach(mixture) > radius
        return certified_N

    def _std_NK(self) -> Tensor:  # noqa: N802
        std_NK = torch.zeros_like(self.shares_NK)
        return std_NK if self.std_pred_N is None else std_NK.scatter(1, self.std_pred_N[:, None], 1.0)

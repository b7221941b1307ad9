"""What stored rows of the certify stage say of any mixture: which images it gets right, and which it certifiably keeps.

Smoothing's rows answer for every alpha and radius, bounds' rows for every mixture at the radii that were bounded; no
pass of a network is needed.

Shapes: N images, R radii, K classes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.boxes import LogitBox, certified_over_box
from ..mixing.certificates import certified_radius
from ..mixing.mixture import Mixture, mixed_classes
from ..mixing.transforms import IdentityTransform
from .smoothing import SmoothingPlan

ROB_ALONE = Mixture(IdentityTransform(), 1.0, 0.0)


class Answers(Protocol):
    """What a report asks of certificates."""

    @property
    def labels_N(self) -> Tensor:  # noqa: N802
        """The labels, (N,)."""

    def clean(self, mixture: Mixture) -> Tensor:
        """Which images the classifier that is certified gets right, (N,)."""

    def certified(self, mixture: Mixture, radius: float) -> Tensor:
        """Which images it gets right wherever an adversary moves them within the radius, (N,)."""

    def reach(self, mixture: Mixture) -> Tensor:
        """The largest radius at which each image is certified, (N,), 0 where there is none."""


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

    def _classes(self) -> Tensor:
        return self.chosen_counts_NK.argmax(dim=1)


@dataclass(frozen=True)
class BoundedAnswers:
    """From bounds of rob's centred logits: of the mixture itself, in Linf, without a doubt."""

    radii: tuple[float, ...]
    labels_N: Tensor
    std_pred_N: Tensor | None
    rob_clean_NK: Tensor
    lower_NRK: Tensor
    upper_NRK: Tensor
    leads_NRK: Tensor

    def clean(self, mixture: Mixture) -> Tensor:
        top_N = mixture.transform(self.rob_clean_NK.double()).argmax(dim=1)
        std_pred_N = top_N if self.std_pred_N is None else self.std_pred_N
        right_N: Tensor = mixed_classes(self.rob_clean_NK, std_pred_N, mixture) == self.labels_N
        return right_N

    def reach(self, mixture: Mixture) -> Tensor:
        each = [torch.where(self.certified(mixture, radius), radius, 0.0) for radius in self.radii]
        return torch.stack(each).amax(dim=0).double()

    def certified(self, mixture: Mixture, radius: float) -> Tensor:
        """Errors: InvalidInputError for a radius that was not bounded."""
        if radius not in self.radii:
            raise InvalidInputError(
                f"radius {radius:g} was not bounded; there are {', '.join(f'{known:g}' for known in self.radii)}"
            )
        return certified_over_box(self.box(radius), self.labels_N, mixture)

    def box(self, radius: float) -> LogitBox:
        """What is known of rob's logits within the radius, which must be one that was bounded."""
        at = self.radii.index(radius)
        return LogitBox(self.lower_NRK[:, at], self.upper_NRK[:, at], self.leads_NRK[:, at])

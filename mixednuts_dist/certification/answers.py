"""What stored rows of the certify stage say of any mixture: which images it gets right, and which it certifiably keeps.

Smoothing's rows answer for every alpha and radius, bounds' rows for every mixture at the radii that were bounded; no
pass of a network is needed.

Shapes: N images, R radii, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.boxes import LogitBox, certified_over_box, map_leads
from ..mixing.certificates import certified_radius, smoothed_margin
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.mixture import Mixture, mixed_classes
from ..mixing.transforms import IdentityTransform, LogitTransform
from ..selection.inputs import CachedLogits, Certificates
from ..selection.kernel import Slab
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

    def certificates(self, radius: float, sample_ids: Sequence[int] | None = None) -> Certificates:
        """What the search by certificates reads of these images, in order; of all by default."""


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
        return _OfVotes(held_N, shares_NK[at], torch.log1p(-margins_N[at][held_N]))

    def _classes(self) -> Tensor:
        return self.chosen_counts_NK.argmax(dim=1)


@dataclass(frozen=True)
class _OfVotes:
    held_B: Tensor
    shares_BK: Tensor
    log_gaps_n: Tensor

    def log_gaps(self, slab: Slab, ln_k: int | None) -> Tensor:  # noqa: ARG002
        return self.log_gaps_n.expand(len(slab.powers), len(slab.scales), -1)


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
        each = [self.certified(mixture, radius).double() * radius for radius in self.radii]
        return torch.stack(each).amax(dim=0)

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

    def certificates(self, radius: float, sample_ids: Sequence[int] | None = None) -> Certificates:
        """Errors as in `certified`."""
        at = slice(None) if sample_ids is None else torch.as_tensor(sample_ids)
        held_N, box, labels_N = self.certified(ROB_ALONE, radius)[at], self.box(radius).double(), self.labels_N[at]
        ends = (each[at][held_N] for each in (box.lower_BK, box.upper_BK, box.leads_BK))
        return _OfBoxes(held_N, LogitBox(*ends), labels_N[held_N])

    def rows(self, radius: float) -> CachedLogits:
        """For a search without attacked images: the clean ones stand in for them."""
        clean_NK = self.rob_clean_NK
        std_pred_N = clean_NK.argmax(dim=1) if self.std_pred_N is None else self.std_pred_N
        return CachedLogits(clean_NK, clean_NK, self.labels_N, std_pred_N, certificates=self.certificates(radius))


@dataclass(frozen=True)
class _OfBoxes:
    held_B: Tensor
    box: LogitBox
    labels_n: Tensor
    shares_BK: None = None

    def log_gaps(self, slab: Slab, ln_k: int | None) -> Tensor:
        by_power = []
        for power in slab.powers:
            leads_nK = map_leads(LogitTransform(1.0, power, slab.bias, slab.clamp, ln_k), self.box, self.labels_n)
            behind_nK = (-leads_nK).scatter(1, self.labels_n[:, None], 0.0)
            by_scale = [log_one_minus_signed_margin(scale * behind_nK, self.labels_n) for scale in slab.scales]
            by_power.append(torch.stack(by_scale))
        return torch.stack(by_power)

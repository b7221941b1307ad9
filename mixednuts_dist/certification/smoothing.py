"""Count the votes of a classifier under Gaussian noise, until no further draw can change a certificate.

Draw d of an image is its pixels plus sigma times noise that depends on the seed, the image's id and d alone, so votes
do not depend on the partition, the order or the batch composition. The first `n_choose` draws choose the class, and
later draws bound its vote, because the class must not be chosen by the draws that certify it.

A look is a check after a fixed number of draws (`confidence.py`). All undecided images get their draws up to the next
look, in batches that hold draws of several images. Only the last batch of each look is padded.

Shapes: B or N images of C x H x W, N draws in a batch, K classes, Q questions.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform
from .certificates import certified_radius, needed_margin, vote_needed
from .confidence import Looks, lower_bound, upper_bound

ABSTAINS = -1  # instead of a class
ROB_ALONE = Mixture(IdentityTransform(), 1.0, 0.0)
_BLOCK = 16  # draws per generator, because creating a generator costs as much as a few hundred random numbers


@dataclass(frozen=True)
class SmoothingPlan:
    """The noise, the draws per image, and the questions that the draws have to answer.

    Raises:
        InvalidInputError: if sigma, the confidence, an alpha or the number of draws is out of range.
    """

    sigma: float
    n: int  # draws that bound the vote, at most
    confidence: float
    n_choose: int  # earlier draws, which choose the class
    alphas: tuple[float, ...]
    radii: tuple[float, ...]
    stop_when_decided: bool = True

    def __post_init__(self) -> None:
        _ = self.looks, self.least_vote

    @property
    def looks(self) -> Looks:
        """The numbers of draws at which an image may stop."""
        single = {} if self.stop_when_decided else {"first": self.n}
        return Looks.of(self.n, self.confidence, **single)

    @property
    def least_vote(self) -> float:
        """The vote above which an image is certified at the largest alpha and the smallest radius."""
        return vote_needed(min(self.radii), sigma=self.sigma, alpha=max(self.alphas))

    @property
    def questions(self) -> tuple[Tensor, Tensor]:
        """The margin to exceed and the distance (in standard deviations) per alpha and radius, each (Q,) float64."""
        asked = [(needed_margin(alpha), radius / self.sigma) for alpha in self.alphas for radius in self.radii]
        needed_Q, distance_Q = torch.tensor(asked, dtype=torch.float64).unbind(dim=1)
        return needed_Q, distance_Q


def mixed_votes(std_BK: Tensor, counts_BK: Tensor, mixture: Mixture) -> Tensor:
    """Return the mixed probabilities of the classes if the shares of the votes are exact, (B, K) float64."""
    shares_BK = counts_BK.double() / counts_BK.sum(dim=1, keepdim=True)
    return mixture.one_minus_alpha * std_BK + mixture.alpha * shares_BK


@dataclass(frozen=True)
class Votes:
    """The votes of some images, in CPU memory."""

    chosen_counts_BK: Tensor  # int32, in the draws that choose the class
    counts_BK: Tensor  # int32, in the draws that bound its vote

    @property
    def n_forward(self) -> int:
        """The number of passes, one per draw."""
        return int(self.chosen_counts_BK.sum() + self.counts_BK.sum())

    @property
    def classes(self) -> Tensor:
        """The class with the most votes among the draws that choose, (B,)."""
        return self.chosen_counts_BK.argmax(dim=1)

    def settled_classes(self, std_BK: Tensor, looks: Looks, mixture: Mixture) -> Tensor:
        """Return the classes of the smoothed classifier, (B,); `ABSTAINS` if the draws do not settle the class.

        The first draws choose the class with the most mixed votes. It is returned if the lower bound of its mixed vote
        is above the upper bounds of all other classes. These K bounds hold together: each has 1/K of the error.
        `std_BK` are probabilities of the standard classifier.
        """
        chosen_B1 = mixed_votes(std_BK, self.chosen_counts_BK, mixture).argmax(dim=1, keepdim=True)
        n_drawn_B1 = self.counts_BK.sum(dim=1, keepdim=True)
        errors_B1 = looks.errors_at(n_drawn_B1.squeeze(1))[:, None] / self.counts_BK.shape[1]
        low_BK, high_BK = (
            mixture.one_minus_alpha * std_BK + mixture.alpha * bound(self.counts_BK, n_drawn_B1, errors_B1)
            for bound in (lower_bound, upper_bound)
        )
        rivals_B1 = high_BK.scatter(1, chosen_B1, -torch.inf).amax(dim=1, keepdim=True)
        return torch.where(low_BK.gather(1, chosen_B1) > rivals_B1, chosen_B1, ABSTAINS).squeeze(1)


@dataclass(frozen=True)
class SmoothedAnswers:
    """Stored votes of the robust classifier, which give the results of any mixed classifier without another pass."""

    plan: SmoothingPlan
    labels_N: Tensor
    std_pred_N: Tensor | None  # classes of the standard classifier; None: the robust classifier alone
    votes: Votes

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """p_A and p_B of the chosen class of each image, each (N,) float64; both hold simultaneously."""
        return self.plan.looks.vote_bounds(self.votes.counts_BK, self.votes.classes)

    def clean(self, mixture: Mixture) -> Tensor:
        """Return which images are correct if the shares of the draws are exact, (N,) bool: an estimate, not a bound."""
        counts_NK = self.votes.chosen_counts_BK + self.votes.counts_BK
        return mixed_votes(self._std_NK(), counts_NK, mixture).argmax(dim=1) == self.labels_N

    def predicted(self, mixture: Mixture) -> Tensor:
        """Return which images the smoothed classifier predicts correctly, (N,) bool; an abstention is an error."""
        return self.votes.settled_classes(self._std_NK(), self.plan.looks, mixture) == self.labels_N

    def reach(self, mixture: Mixture) -> Tensor:
        """Return the radius up to which the label of each image is certified, (N,) float64; 0 for none."""
        if mixture.alpha <= 0.5:  # the standard classifier alone may decide
            return torch.zeros(len(self.labels_N), dtype=torch.float64)
        p_top_N, p_second_N = self.bounds
        radii_N = certified_radius(p_top_N, sigma=self.plan.sigma, alpha=mixture.alpha, p_second_B=p_second_N)
        return torch.where(self.votes.classes == self.labels_N, radii_N.clamp_min(0), 0.0)

    def certified(self, mixture: Mixture, radius: float) -> Tensor:
        """Return which images are certified at a radius, (N,) bool."""
        return self.reach(mixture) > radius

    def _std_NK(self) -> Tensor:  # noqa: N802
        std_NK = torch.zeros(self.votes.counts_BK.shape, dtype=torch.float64)
        return std_NK if self.std_pred_N is None else std_NK.scatter(1, self.std_pred_N[:, None], 1.0)


def noisy(x_CHW: Tensor, sigma: float, seed: int, sample_id: int, start: int, stop: int) -> Tensor:
    """Return the noisy images of draws `start` to `stop` of an image, (N, C, H, W).

    The noise is made on the image's device: the bits agree between devices of one kind.
    """
    first, last = start // _BLOCK, (stop - 1) // _BLOCK
    blocks = [_noise_block(x_CHW, f"certify/{seed}/{sample_id}/{block}") for block in range(first, last + 1)]
    rows = torch.cat(blocks)[start - first * _BLOCK : stop - first * _BLOCK]
    return x_CHW + sigma * rows


def _noise_block(x_CHW: Tensor, name: str) -> Tensor:
    key, shape = hashlib.sha256(name.encode()).digest(), (_BLOCK, *x_CHW.shape)
    if x_CHW.device.type == "cpu":  # torch's generator on a CPU uses only 32 bits of its seed
        philox = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
        return torch.from_numpy(philox.standard_normal(shape, dtype=np.float32))
    generator = torch.Generator(x_CHW.device).manual_seed(int.from_bytes(key[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, device=x_CHW.device, dtype=torch.float32)


@torch.no_grad()
def smoothed_votes(
    logits_of: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    labels_B: Tensor,
    plan: SmoothingPlan,
    *,
    n_classes: int,
    sample_ids: Sequence[int],
    seed: int,
    rows: int,
) -> Votes:
    """Draw until each image's certificates are decided or its draws are used up.

    Args:
        logits_of: logits (B, K) of images (B, C, H, W), in batches of one fixed shape.
        labels_B: with `plan.stop_when_decided`, an image whose chosen class is not its label stops at its first look.
        rows: images per batch.
    """
    looks, labels_B = plan.looks, labels_B.cpu()
    counts_BHK = torch.zeros(len(x_BCHW), 2, n_classes, dtype=torch.int32)  # H: draws that choose, that bound
    open_B, start = torch.arange(len(x_BCHW)), 0
    for look in looks.at:
        stop = plan.n_choose + look
        undrawn = itertools.product(open_B.tolist(), range(start, stop))
        while batch := list(itertools.islice(undrawn, rows)):
            x_NCHW = []
            for i, group in itertools.groupby(batch, key=itemgetter(0)):
                draws = [draw for _, draw in group]
                x_NCHW.append(noisy(x_BCHW[i], plan.sigma, seed, sample_ids[i], draws[0], draws[-1] + 1))
            classes_N = logits_of(torch.cat(x_NCHW)).argmax(dim=1).cpu()
            image_N, draw_N = torch.tensor(batch).unbind(dim=1)
            one = torch.ones((), dtype=torch.int32)
            counts_BHK.index_put_((image_N, (draw_N >= plan.n_choose).long(), classes_N), one, accumulate=True)
        chosen_B, start = counts_BHK[open_B, 0].argmax(dim=1), stop
        decided_B = looks.decided(counts_BHK[open_B, 1], chosen_B, plan.questions)
        if plan.stop_when_decided:  # no radius counts if the smoothed classifier is wrong
            decided_B |= chosen_B != labels_B[open_B]
        open_B = open_B[~decided_B]
    return Votes(counts_BHK[:, 0], counts_BHK[:, 1])

"""Compute confidence bounds of votes from draws, and decide when further draws cannot change a certificate.

The vote for a class is the probability that the robust classifier predicts this class under noise. A draw that predicts
the class is a hit. Draws are independent, so the number of hits is binomial, and the bound of Clopper and Pearson is
exact.

**One event.** A certificate needs a lower bound of the vote for one class, p_A, and an upper bound of the votes for all
others, p_B. The allowed error of an image is divided: three quarters for p_A, and one quarter for the K - 1 bounds of
the other classes. By the union bound, all K bounds hold simultaneously with the confidence of the image. Then every
radius for every alpha is valid. The class is fixed before these draws.

**Looks.** The hits of an image are checked after 100, 200, 400, ... draws. Each check is a look. The looks share the
allowed error, as in the adaptive sampling of Horvath et al. 2022, so an image may stop at any look, for any reason. The
last look has half of the error.

For each image, the probability that a false certificate is issued is at most 1 - confidence
(`docs/certified-robustness.md` explains the limits). Draws of different images are independent, so the number of false
bounds among N images is at most binomial (`most_false`).

Shapes: B images, K classes, Q questions.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtr, betaincinv
from torch import Tensor

from ..errors import InvalidInputError
from .certificates import smoothed_margin

_TOP_SHARE = 0.75  # p_A of the class itself gets this share of the allowed error
_MOST_DRAWS = 10_000_000  # per image


def lower_bound(hits: Tensor, n: Tensor | int, error: Tensor | float) -> Tensor:
    """Return Clopper and Pearson's lower bound of a probability from `hits` of `n` draws, float64, shaped as `hits`.

    The bound exceeds the true probability in at most the share `error` of all experiments.

    >>> lower_bound(torch.tensor([0, 1000]), 1000, 0.001)
    tensor([0.0000, 0.9931], dtype=torch.float64)
    """
    hits = hits.double()
    misses = torch.as_tensor(n, device=hits.device) - hits
    found = betaincinv(np.maximum(hits.cpu().numpy(), 1e-300), (misses + 1).cpu().numpy(), np.asarray(error))
    return torch.where(hits == 0, 0.0, torch.from_numpy(np.asarray(found)).to(hits.device))


def upper_bound(hits: Tensor, n: Tensor | int, error: Tensor | float) -> Tensor:
    """Return Clopper and Pearson's upper bound, `1 - lower_bound(misses)`; arguments as in `lower_bound`."""
    return 1 - lower_bound(torch.as_tensor(n, device=hits.device) - hits.double(), n, error)


def most_false(n_images: int, confidence: float) -> int:
    """Return an upper bound of the number of images with a false bound, valid with probability `confidence`.

    Subtract it from a count of certified images to get a statement about all `n_images` images together.

    >>> most_false(899, 0.999)
    5
    """
    return next(n for n in itertools.count() if bdtr(n, n_images, 1 - confidence) >= confidence)


@dataclass(frozen=True)
class Looks:
    """The numbers of draws after which an image is checked, and the allowed error of each check."""

    at: tuple[int, ...]  # increasing; the last is the maximum number of draws
    errors: tuple[float, ...]  # together 1 - confidence

    @classmethod
    def of(cls, n: int, confidence: float, first: int = 100) -> "Looks":
        """Return looks after `first`, 2 `first`, 4 `first`, ..., `n` draws; a single look if `n` is at most `first`.

        >>> Looks.of(1000, 0.999).at
        (100, 200, 400, 1000)

        Raises:
            InvalidInputError: if the confidence is not in (0, 1), or if there are no draws.
        """
        if not 0 < confidence < 1:
            raise InvalidInputError(f"confidence={confidence} must be between 0 and 1, for example 0.999")
        if n < 1:
            raise InvalidInputError(f"n={n} must be at least 1, for example 10000")
        early = [first]
        while early[-1] * 4 <= n:
            early.append(early[-1] * 2)
        early = [look for look in early if look < n]
        error, shares = 1 - confidence, [0.5 / len(early)] * len(early) + [0.5] if early else [1.0]
        return cls((*early, n), tuple(error * share for share in shares))

    def errors_at(self, n_drawn_B: Tensor) -> Tensor:
        """Return the error of the look at which each image stopped, (B,) float64.

        Raises:
            InvalidInputError: if an image stopped at a number of draws that is not a look.
        """
        if unknown := sorted(set(n_drawn_B.tolist()) - set(self.at)):
            raise InvalidInputError(f"{unknown[0]} draws are not one of the looks {self.at}: no bound holds there")
        return torch.tensor([self.errors[self.at.index(n)] for n in n_drawn_B.tolist()], dtype=torch.float64)

    def vote_bounds(self, counts_BK: Tensor, classes_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_A and p_B of given classes, each (B,) float64; both hold simultaneously with the confidence."""
        n_drawn_B = counts_BK.sum(dim=1)
        hits = top_and_second(counts_BK, classes_B)
        return self._bounds(*hits, n_drawn_B, counts_BK.shape[1], self.errors_at(n_drawn_B))

    def decided(self, counts_BK: Tensor, classes_B: Tensor, questions: tuple[Tensor, Tensor]) -> Tensor:
        """Return which images need no further draw, (B,) bool, because each question is decided.

        A question asks whether the image is certified at one alpha and one radius. It is decided if the bounds at this
        look certify the image, if even hits alone in all further draws could not certify the image, or if the vote is
        too small with the confidence of this look. The decision only saves draws, because the bounds are valid whenever
        an image stops.

        Args:
            classes_B: the class of each image whose vote is bounded.
            questions: the margin to exceed and the distance in standard deviations of each question, each (Q,).
        """
        (needed_Q, distance_Q), n_last, n_classes = questions, self.at[-1], counts_BK.shape[1]
        n_drawn_B = counts_BK.sum(dim=1)
        (top_B, second_B), error_B = top_and_second(counts_BK, classes_B), self.errors_at(n_drawn_B)
        now = self._bounds(top_B, second_B, n_drawn_B, n_classes, error_B)
        best = self._bounds(top_B + n_last - n_drawn_B, second_B, n_last, n_classes, self.errors[-1])
        reach_top_B = torch.minimum(best[0], upper_bound(top_B, n_drawn_B, error_B))
        reach_second_B = torch.maximum(best[1], lower_bound(second_B, n_drawn_B, error_B))
        certain_BQ = smoothed_margin(now[0][:, None], now[1][:, None], distance_Q) > needed_Q
        reach_BQ = smoothed_margin(reach_top_B[:, None], reach_second_B[:, None], distance_Q) > needed_Q
        return (n_drawn_B == n_last) | (certain_BQ | ~reach_BQ).all(dim=1)

    @staticmethod
    def _bounds(
        top_B: Tensor, second_B: Tensor, n: Tensor | int, n_classes: int, error: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        p_top_B = lower_bound(top_B, n, _TOP_SHARE * error)
        p_second_B = upper_bound(second_B, n, (1 - _TOP_SHARE) * error / (n_classes - 1))
        return p_top_B, torch.minimum(p_second_B, 1 - p_top_B)


def top_and_second(counts_BK: Tensor, classes_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hits of given classes and of the most frequent other class, each (B,)."""
    top_B = counts_BK.gather(1, classes_B[:, None]).squeeze(1)
    return top_B, counts_BK.scatter(1, classes_B[:, None], -1).amax(dim=1)


def require_enough_draws(n: int, confidence: float, least_vote: float) -> None:
    """Reject a number of draws that is too small for any image to exceed `least_vote`.

    Raises:
        InvalidInputError: with the smallest number of draws that suffices.
    """

    def most(n: int) -> float:
        """Return p_A if all draws hit; p_B is then 1 - p_A."""
        return float(lower_bound(torch.tensor([n]), n, _TOP_SHARE * Looks.of(n, confidence).errors[-1]))

    if most(n) > least_vote:
        return
    if most(_MOST_DRAWS) <= least_vote:
        raise InvalidInputError(
            f"no image is certified at the smallest radius and the largest alpha, even if all of {_MOST_DRAWS:,} draws "
            "agree. Give a smaller radius or a larger sigma"
        )
    needed = math.ceil(math.log(1 - confidence) / math.log(least_vote))  # error^(1/n) is the bound of a single look
    while most(needed) <= least_vote:
        needed += max(1, needed // 1000)
    raise InvalidInputError(
        f"n={n} draws are too few for confidence {confidence:g}: even if all of them agree, no image is certified at "
        f"the smallest radius and the largest alpha. Give n of at least {needed:,}"
    )

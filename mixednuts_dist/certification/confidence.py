"""What draws say of a smoothed vote: confidence bounds, and when further draws cannot change a certificate.

A vote is the mean of independent draws that are 0 or 1, so the number of hits is binomial and the bound of Clopper and
Pearson is exact.

**Looks.** The draws of an image are looked at a few times, at numbers that double up to the full one, and the allowed
error is shared among the looks: at each, the bound holds with its share, so by the union bound all hold together, and
an image may stop at any of them. The last look keeps half of the error, which costs an image that needs all of its
draws 0.2 standard errors of its vote (3.29 instead of 3.09 at confidence .999). A confidence sequence that may be
looked at after each draw costs more: where all of 10,000 draws hit, the beta mixture's lower bound is .9984, that of
looks .9992, that of no early stop .9993.

Shapes: B images, T thresholds.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from ..errors import InvalidInputError


def lower_bound(hits_B: Tensor, n_B: Tensor | int, error: float) -> Tensor:
    """Clopper & Pearson's lower bound of a probability from `hits` of `n` draws, (B,), float64.

    It is above the true probability in at most the share `error` of all experiments.

    >>> lower_bound(torch.tensor([0, 1000]), 1000, 0.001)
    tensor([0.0000, 0.9931], dtype=torch.float64)
    """
    hits_B = hits_B.double()
    misses_B = torch.as_tensor(n_B, device=hits_B.device) - hits_B
    return _quantile(hits_B, misses_B + 1, error)


def upper_bound(hits_B: Tensor, n_B: Tensor | int, error: float) -> Tensor:
    """The same from above: `1 - lower_bound(misses)`, (B,), float64."""
    hits_B = hits_B.double()
    return 1 - lower_bound(torch.as_tensor(n_B, device=hits_B.device) - hits_B, n_B, error)


@dataclass(frozen=True)
class Looks:
    """When an image's draws are looked at, and with what share of the allowed error each time."""

    at: tuple[int, ...]  # numbers of draws, rising; the last is all
    errors: tuple[float, ...]  # of each look; together 1 - confidence

    @classmethod
    def of(cls, n: int, confidence: float, first: int = 100) -> "Looks":
        """Looks at `first`, twice as many, ..., `n` draws; one where `n` is not above `first`.

        >>> Looks.of(1000, 0.999).at
        (100, 200, 400, 1000)

        Raises:
            InvalidInputError: for a confidence outside (0, 1), or no draws.
        """
        _require_draws(n, confidence)
        early = [first]
        while early[-1] * 4 <= n:
            early.append(early[-1] * 2)
        early = [look for look in early if look < n]
        error, shares = 1 - confidence, [0.5 / len(early)] * len(early) + [0.5] if early else [1.0]
        return cls((*early, n), tuple(error * share for share in shares))

    @classmethod
    def one(cls, n: int, confidence: float) -> "Looks":
        """No look before all draws; errors as in `of`."""
        _require_draws(n, confidence)
        return cls((n,), (1 - confidence,))

    def next_after(self, n_drawn: int) -> int:
        """The number of draws at the next look."""
        return next(look for look in self.at if look > n_drawn)

    def error_at(self, n_drawn: int) -> float:
        """The error allowed at a look.

        Raises:
            InvalidInputError: for a number of draws at which there is none.
        """
        if n_drawn not in self.at:
            raise InvalidInputError(f"{n_drawn} draws are no look of {self.at}: the bound would not hold there")
        return self.errors[self.at.index(n_drawn)]

    def lower_bounds(self, hits_B: Tensor, n_drawn_B: Tensor) -> Tensor:
        """Lower bounds of the votes of images that stopped at different looks, (B,); 0 for those without draws."""
        bounds_B = torch.zeros(len(hits_B), dtype=torch.float64)
        for look, error in zip(self.at, self.errors, strict=True):
            there_B = n_drawn_B == look
            bounds_B[there_B] = lower_bound(hits_B[there_B], look, error)
        return bounds_B

    def decided(self, hits_B: Tensor, n_drawn: int, thresholds_T: Tensor) -> Tensor:
        """Which images need no further draw: each threshold is below their lower bound, or out of their reach, (B,).

        Out of reach is a threshold that is above the upper bound (the vote itself is below it, with the look's
        confidence), or that not even hits alone would lead to at the last look.
        """
        error, n_last = self.error_at(n_drawn), self.at[-1]
        if n_drawn == n_last:
            return torch.ones_like(hits_B, dtype=torch.bool)
        low_B, high_B = lower_bound(hits_B, n_drawn, error), upper_bound(hits_B, n_drawn, error)
        most_B = lower_bound(hits_B + (n_last - n_drawn), n_last, self.errors[-1])
        reach_B = torch.minimum(high_B, most_B)
        open_BT = (thresholds_T >= low_B[:, None]) & (thresholds_T < reach_B[:, None])
        return ~open_BT.any(dim=1)


def _require_draws(n: int, confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; 0.999 is usual")
    if n < 1:
        raise InvalidInputError(f"n={n} draws bound nothing; 10,000 are usual")


def require_enough_draws(n: int, confidence: float, thresholds: Sequence[float]) -> None:
    """Refuse a number of draws that could not certify even the smallest vote that is asked for.

    Raises:
        InvalidInputError: naming the least number that could.
    """
    least, error = min(thresholds), 1 - confidence
    if _most(n, confidence) > least:
        return
    fewest = math.ceil(math.log(error) / math.log(least))  # error^(1/n) is the bound where one look has all the error
    needed = next(n for n in itertools.count(max(fewest, 1)) if _most(n, confidence) > least)
    raise InvalidInputError(
        f"n={n} draws are too few for confidence {confidence:g}: even if all of them agree, no image is certified at "
        f"the smallest radius and the largest alpha asked for. Give n of at least {needed:,}"
    )


def _most(n: int, confidence: float) -> float:
    """The bound where all draws hit."""
    return float(lower_bound(torch.tensor([n]), n, Looks.of(n, confidence).errors[-1]))


def _quantile(a_B: Tensor, b_B: Tensor, error: float) -> Tensor:
    """The beta distribution's `error` quantile, 0 where a = 0."""
    found = betaincinv(np.maximum(a_B.cpu().numpy(), 1e-300), b_B.cpu().numpy(), error)
    return torch.where(a_B == 0, 0.0, torch.from_numpy(np.asarray(found)).to(a_B.device))

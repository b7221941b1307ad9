"""Random classifiers: gradients averaged over draws (EOT), and how likely the point that an attack leaves fools.

A pass holds n rows of each point, n draws of the classifier's randomness; the loss of an attack is the mean of the
draws' losses (Athalye et al. 2018; AutoAttack's version `rand` takes 20). While it searches, a point counts as fooling
where the mean of the draws' probabilities has another class than the label's.

One draw says little of a random classifier, so the verdict is a rate: fresh draws at the final point bound the
probability p that it fools by a confidence sequence, which may be looked at after every draw. Robust is an image with
p < bound, broken one with p > bound, and undecided one whose interval holds the bound after `MOST_DRAWS` draws.

A classifier may have a method `forward_with_seeds(x_BCHW, seeds_B)`, seeds int64. It is then called in place of
`forward`, with seeds that are hashes of the run's seed, the pixels of the point, what the draw is for and its number:
an attack's points follow from its seed and the image's sample id, so neither partition nor order nor company move them.
Without that method draws come from wherever the classifier takes them, and repeat with nothing.

Shapes: B points of C x H x W, n draws, K classes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import filled
from ..acceleration.tf32 import tf32_allowed
from ..config.register import ATTACKS
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..norms.random import hashed, key_number, keys_of
from .gradient_model import AttackMode, MixedOutputs, Outputs
from .sequential import ConfidenceSequence

CLIMB, JUDGE, RATE = range(3)  # what a draw is for: none serves twice
MOST_DRAWS = 400  # at a final point
BOUND = 0.5  # of the probability to fool
_ENDLESS = 10**12  # draws that there are: the bounds of a finite population become those of independent draws


class DrawnOutputs(Outputs):
    """Several draws of one pass; its own logits are the log of their mean probabilities."""

    def __init__(self, draws: Sequence[Outputs]) -> None:
        self._draws = tuple(draws)

    @property
    def draws(self) -> Sequence[Outputs]:
        return self._draws

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        return _log_mean(each.logits for each in self._draws)

    @cached_property
    def model_logits(self) -> Tensor:  # type: ignore[override]
        return _log_mean(each.model_logits for each in self._draws)


class Draws:
    """n draws of a classifier at each point, all in one pass. Called, it is the expected classifier.

    Example:
        >>> draws = Draws(lambda x: x.flatten(1)[:, :3], 4, seed=0)
        >>> draws(torch.zeros(2, 3, 1, 1)).exp().sum(dim=1).allclose(torch.ones(2))
        True
    """

    def __init__(self, model: Callable[[Tensor], Tensor], n: int, seed: int, mode: AttackMode = "transfer") -> None:
        self.model, self.n, self._seed, self._mode = model, n, seed, mode

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """log E p(class), (B, K)."""
        return self.outputs(x_BCHW, JUDGE).model_logits.float()

    def climb(self, x_BCHW: Tensor) -> Outputs:
        """What attacks take gradients through."""
        return self.outputs(x_BCHW, CLIMB)

    def outputs(self, x_BCHW: Tensor, use: int, first: int = 0) -> DrawnOutputs:
        """The draws `first` .. `first + n - 1`."""
        rows = x_BCHW.repeat(self.n, *[1] * (x_BCHW.dim() - 1))
        seeds = self._seeds(x_BCHW.detach(), use, first)
        if isinstance(self.model, MixedClassifier):
            std, rob = (_drawn(part, rows, seeds).chunk(self.n) for part in (self.model.std, self.model.rob))
            both = zip(std, rob, strict=True)
            return DrawnOutputs([MixedOutputs(self.model, self._mode, *each) for each in both])
        return DrawnOutputs([Outputs(logits) for logits in _drawn(self.model, rows, seeds).chunk(self.n)])

    def _seeds(self, x_BCHW: Tensor, use: int, first: int) -> Tensor:
        """(n B,) int64, in the order of the rows; at least 0."""
        keys_B = keys_of(x_BCHW, key_number(self._seed, use))
        return (hashed(keys_B, first, self.n) & torch.iinfo(torch.int64).max).t().flatten()


@dataclass(frozen=True)
class FoolingRates:
    """Of each image's final point: bounds of the probability that it fools, with 95 % confidence at every look."""

    low: Tensor  # (B,) float64
    high: Tensor
    n_draws: Tensor  # (B,) int64
    bound: float

    @property
    def robust(self) -> Tensor:
        """(B,) bool: it fools less often than the bound."""
        return self.high < self.bound

    @property
    def broken(self) -> Tensor:
        """(B,) bool: it fools more often."""
        return self.low > self.bound

    @property
    def undecided(self) -> Tensor:
        """(B,) bool: the draws do not tell."""
        return ~(self.robust | self.broken)


@torch.no_grad()
def fooling_rates(draws: Draws, x_BCHW: Tensor, y_B: Tensor, *, rows: int, bound: float = BOUND) -> FoolingRates:
    """How often each point fools, in passes of `rows` points, n draws each.

    Draws of a point end as soon as its interval leaves the bound out.
    """
    found = [ConfidenceSequence(_ENDLESS) for _ in x_BCHW]
    going = torch.arange(len(x_BCHW))
    for first in range(0, MOST_DRAWS, draws.n):
        for part in torch.split(going, rows):
            there = part.to(x_BCHW.device)
            with tf32_allowed(False):
                seen = draws.outputs(filled(x_BCHW[there], rows), RATE, first).draws
            classes_Bn = torch.stack([each.model_logits.argmax(dim=1)[: len(part)] for each in seen], dim=1)
            for i, wrong in zip(part.tolist(), (classes_Bn != y_B[there, None]).tolist(), strict=True):
                found[i].add(map(float, wrong))
        intervals = [found[i].interval for i in going.tolist()]
        going = going[torch.tensor([low <= bound <= high for low, high in intervals], dtype=torch.bool)]
        if not len(going):
            break
    low, high = (torch.tensor([each.interval[side] for each in found], dtype=torch.float64) for side in (0, 1))
    return FoolingRates(low, high, torch.tensor([each.n_seen for each in found]), bound)


def check_eot(eot: Any, attacks: Iterable[str]) -> None:
    """Refuse a number of draws that is none, and draws for attacks that take no gradient.

    Raises:
        InvalidInputError: with the value and the next step.
    """
    if eot is None:
        return
    if isinstance(eot, bool) or not isinstance(eot, int) or eot < 1:
        raise InvalidInputError(f"eot={eot!r} must be a number of draws, at least 1; AutoAttack's rand takes 20")
    names = list(attacks)
    if not any(ATTACKS.get(name).takes_gradient for name in names):
        raise InvalidInputError(
            f"eot={eot} averages gradients, and {', '.join(names)} takes none; leave eot out or add apgd-ce"
        )


def _drawn(part: Any, rows: Tensor, seeds: Tensor) -> Tensor:
    seeded = getattr(part, "forward_with_seeds", None)
    logits: Tensor = part(rows) if seeded is None else seeded(rows, seeds)
    return logits


def _log_mean(logits: Iterable[Tensor]) -> Tensor:
    """The log of the mean of the probabilities, (B, K)."""
    each = torch.stack([one.double().log_softmax(dim=1) for one in logits])
    return each.logsumexp(dim=0) - math.log(len(each))

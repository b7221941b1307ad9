"""The parameters that the MixedNUTS paper deploys, by name.

The values of the appendix table of candidates, in full precision: scale, power and bias are points of the printed grids
of eight values (log-spaced scales, uniform powers and biases), and alpha has the digits of the published models, of
which the table prints three.
"""

import math
from fractions import Fraction
from typing import TypeVar

from ..errors import InvalidInputError
from .choice import Choice
from .grid import Grid

_GRID_POINTS = 8
_Entry = TypeVar("_Entry")


class MixedNUTSParameters(Choice):
    """A `Choice` that no search made: by hand, or `published`.

    >>> MixedNUTSParameters.published("cifar10").scale
    5.0
    """

    @classmethod
    def published(cls, dataset: str) -> "Choice":
        """The paper's values for "cifar10", "cifar100" or "imagenet"."""
        return _look_up(_PUBLISHED, dataset)


def published_grid(dataset: str) -> Grid:
    """The grid that the paper searches for "cifar10", "cifar100" or "imagenet": 8 x 8 x 8 candidates, no betas.

    CIFAR-100's biases span [-2.5, 0]: the printed optimum -2.14 is not on eight points of the printed [-2.5, -0.4].
    """
    return _look_up(_GRIDS, dataset)


def _look_up(table: dict[str, _Entry], dataset: str) -> _Entry:
    if dataset not in table:
        raise InvalidInputError(f"nothing is published for dataset={dataset!r}; valid names: {', '.join(table)}")
    return table[dataset]


def _log_spaced(low: float, high: float) -> tuple[float, ...]:
    steps = _GRID_POINTS - 1
    return tuple(math.exp(math.log(low) + i * math.log(high / low) / steps) for i in range(_GRID_POINTS))


def _uniform(low: str, high: str) -> tuple[float, ...]:
    start, width = Fraction(low), Fraction(high) - Fraction(low)
    return tuple(float(start + width * i / (_GRID_POINTS - 1)) for i in range(_GRID_POINTS))


def _at(dataset: str, index: tuple[int, int, int], *, alpha: float, surrogate_alpha: float, ln_k: int | None) -> Choice:
    grid = _GRIDS[dataset]
    scale, power, bias = grid.scales[index[0]], grid.powers[index[1]], grid.biases[index[2]]
    return Choice(scale, power, bias, alpha, 1 - alpha, surrogate_alpha=surrogate_alpha, ln_k=ln_k)


_GRIDS = {
    "cifar10": Grid(_log_spaced(0.05, 5), _uniform("1", "4"), _uniform("-1.1", "0")),
    "cifar100": Grid(_log_spaced(0.05, 4), _uniform("1", "4"), _uniform("-2.5", "0")),
    "imagenet": Grid(_log_spaced(0.01, 0.2), _uniform("2", "3"), _uniform("-2", "0")),
}

_PUBLISHED = {
    "cifar10": Choice(5.0, 4.0, -1.1, 0.9987500602493457, 1 - 0.9987500602493457, surrogate_alpha=0.9570535),
    "cifar100": _at("cifar100", (4, 6, 1), alpha=0.9860300534207915, surrogate_alpha=0.9706995, ln_k=None),
    "imagenet": _at("imagenet", (2, 5, 6), alpha=0.9971266414518896, surrogate_alpha=0.9068379, ln_k=250),
}

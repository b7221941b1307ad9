"""The parameters that the MixedNUTS paper deploys, by name.

The values of the appendix table of candidates, in full precision: scale, power and bias are points of the printed grids
of eight values (log-spaced scales, uniform powers and biases), and alpha has the digits of the published models, of
which the table prints three.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from ..errors import InvalidInputError
from .transforms import Clamp, LogitTransform

_GRID_POINTS = 8
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class ParameterGrid:
    """The candidate values of Algorithm 1."""

    scales: tuple[float, ...]
    powers: tuple[float, ...]
    biases: tuple[float, ...]


@dataclass(frozen=True)
class MixedNUTSParameters:
    """All that is needed beside the two base classifiers to build the mixed classifier."""

    scale: float
    power: float
    bias: float
    alpha: float
    one_minus_alpha: float
    surrogate_alpha: float  # alpha_d of the differentiable surrogate
    clamp: Clamp = "gelu"
    ln_k: int | None = None

    def transform(self) -> LogitTransform:
        """The nonlinear map M(scale, power, bias)."""
        return LogitTransform(self.scale, self.power, self.bias, self.clamp, self.ln_k)

    @classmethod
    def published(cls, dataset: str) -> "MixedNUTSParameters":
        """The paper's values for "cifar10", "cifar100" or "imagenet"."""
        return _look_up(_PUBLISHED, dataset)


def published_grid(dataset: str) -> ParameterGrid:
    """The grid that the paper searches for "cifar10", "cifar100" or "imagenet": 8 x 8 x 8 candidates.

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


_GRIDS = {
    "cifar10": ParameterGrid(_log_spaced(0.05, 5), _uniform("1", "4"), _uniform("-1.1", "0")),
    "cifar100": ParameterGrid(_log_spaced(0.05, 4), _uniform("1", "4"), _uniform("-2.5", "0")),
    "imagenet": ParameterGrid(_log_spaced(0.01, 0.2), _uniform("2", "3"), _uniform("-2", "0")),
}

_PUBLISHED = {
    "cifar10": MixedNUTSParameters(
        scale=5.0,
        power=4.0,
        bias=-1.1,
        alpha=0.9987500602493457,
        one_minus_alpha=1 - 0.9987500602493457,
        surrogate_alpha=0.9570535,
    ),
    "cifar100": MixedNUTSParameters(
        scale=_GRIDS["cifar100"].scales[4],
        power=_GRIDS["cifar100"].powers[6],
        bias=_GRIDS["cifar100"].biases[1],
        alpha=0.9860300534207915,
        one_minus_alpha=1 - 0.9860300534207915,
        surrogate_alpha=0.9706995,
    ),
    "imagenet": MixedNUTSParameters(
        scale=_GRIDS["imagenet"].scales[2],
        power=_GRIDS["imagenet"].powers[5],
        bias=_GRIDS["imagenet"].biases[6],
        alpha=0.9971266414518896,
        one_minus_alpha=1 - 0.9971266414518896,
        surrogate_alpha=0.9068379,
        ln_k=250,
    ),
}

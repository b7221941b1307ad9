"""A choice of s, p, c and alpha: found by a search, given by a user, or published in the MixedNUTS paper.

The published choices are those of the candidate table in the paper's appendix, in full precision. Scale, power and bias
are points of the printed grids of eight values (log-spaced scales, uniform powers and biases). Alpha has all digits of
the published models, of which the table prints three.

Commands that only read a choice need no tensors, so this module imports PyTorch only in the methods that compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config.keys import RangeConfig
from ..errors import InvalidInputError
from .grid import Grid

if TYPE_CHECKING:
    from ..mixing.mixture import Mixture
    from ..mixing.transforms import LogitTransform


@dataclass(frozen=True)
class Choice:
    """The parameters of a mixed classifier and their counts: an entry of `search/selected.json`, or given values.

    >>> Choice(scale=5.0, power=4.0, bias=-1.1, alpha=0.8, one_minus_alpha=0.2).cutoff
    0.25
    """

    scale: float
    power: float
    bias: float
    alpha: float
    one_minus_alpha: float  # q / (1 + q), accurate where 1 - alpha is not
    clamp: str = "gelu"
    ln_k: int | None = None
    surrogate_alpha: float = 0.95  # alpha_d of f_aux
    # The following fields are NaN or 0 if no search made the choice.
    beta: float = math.nan
    log_one_minus_cutoff: float = math.nan
    objective: float = math.nan
    objective_count: int = 0
    clean_correct: int = 0  # correct among `total` clean images: exact, by the closed form
    kept_predicted: int = 0  # images that remain correct under the stored perturbations, among `n_robust`
    n_robust: int = 0  # images on which the robust classifier is robust, among `total`
    total: int = 0
    on_grid_edge: tuple[str, ...] = ()  # of "scale", "power", "bias"
    n_only_rob_right: int | None = None  # violations of assumption 4.1, None if unknown
    n_class_changes: int = 0  # violations of assumption 4.2
    # 95% intervals of the shares `clean_correct / total` and `kept_predicted / total`; comparisons ignore them.
    clean_interval: tuple[float, float] = field(default=(0.0, 1.0), compare=False)
    kept_interval: tuple[float, float] = field(default=(0.0, 1.0), compare=False)

    @property
    def cutoff(self) -> float:
        """The margin threshold q of M(rob), from which on `std` cannot change the class; alpha = 1 / (1 + q)."""
        return self.one_minus_alpha / self.alpha

    @property
    def at(self) -> tuple[float, float, float]:
        """The tuple (scale, power, bias)."""
        return self.scale, self.power, self.bias

    def transform(self) -> LogitTransform:
        """Return the nonlinear transformation of the robust classifier's logits."""
        from ..mixing.transforms import LogitTransform

        return LogitTransform(self.scale, self.power, self.bias, self.clamp, self.ln_k)

    def mixture(self) -> Mixture:
        """Return the parameters as a `Mixture`."""
        from ..mixing.mixture import Mixture

        return Mixture(self.transform(), self.alpha, self.one_minus_alpha, surrogate_alpha=self.surrogate_alpha)

    def settings(self) -> dict[str, Any]:
        """Return the same settings as `mixture().settings()`, without importing PyTorch."""
        transform = {name: getattr(self, name) for name in ("scale", "power", "bias", "clamp", "ln_k")}
        return {"transform": "LogitTransform", **transform, "one_minus_alpha": self.one_minus_alpha, "temperature": 0.0}

    @classmethod
    def published(cls, dataset: str) -> Choice:
        """Return the paper's values for "cifar10", "cifar100" or "imagenet".

        >>> Choice.published("cifar10").scale
        5.0
        """
        grid = published_grid(dataset)
        (scale, power, bias), alpha, alpha_d, ln_k = _PUBLISHED[dataset]
        at = grid.scales[scale], grid.powers[power], grid.biases[bias]
        return cls(*at, alpha, 1 - alpha, surrogate_alpha=alpha_d, ln_k=ln_k)


def weights_at(log_one_minus_threshold: float) -> dict[str, Any]:
    """Return the fields of a `Choice` that follow from its margin threshold."""
    threshold = -math.expm1(log_one_minus_threshold)
    alpha, one_minus_alpha = 1 / (1 + threshold), threshold / (1 + threshold)
    return {"alpha": alpha, "one_minus_alpha": one_minus_alpha, "log_one_minus_cutoff": log_one_minus_threshold}


def published_grid(dataset: str) -> Grid:
    """Return the grid that the paper searches for "cifar10", "cifar100" or "imagenet": 8 x 8 x 8 candidates, no betas.

    CIFAR-100's biases span [-2.5, 0]: the printed optimum -2.14 is not on eight points of the printed [-2.5, -0.4].
    """
    if dataset not in _RANGES:
        raise InvalidInputError(f"nothing is published for dataset={dataset!r}; valid names: {', '.join(_RANGES)}")
    scales, *others = _RANGES[dataset]
    powers, biases = (RangeConfig(min=low, max=high).values() for low, high in others)
    return Grid(RangeConfig(min=scales[0], max=scales[1], spacing="log").values(), powers, biases)


# The least and the largest scale, power and bias.
_RANGES = {
    "cifar10": ((0.05, 5), (1, 4), (-1.1, 0)),
    "cifar100": ((0.05, 4), (1, 4), (-2.5, 0)),
    "imagenet": ((0.01, 0.2), (2, 3), (-2, 0)),
}
# The place of the choice on the grid, alpha, alpha_d and the LayerNorm width.
_PUBLISHED = {
    "cifar10": ((7, 7, 0), 0.9987500602493457, 0.9570535, None),
    "cifar100": ((4, 6, 1), 0.9860300534207915, 0.9706995, None),
    "imagenet": ((2, 5, 6), 0.9971266414518896, 0.9068379, 250),
}

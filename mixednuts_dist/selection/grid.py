"""The candidates of Algorithm 1: every scale with every power and bias, for one clamp and one LayerNorm width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..config.keys import SearchConfig, grid_values
from ..errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    from ..mixing.clamps import Clamp

AXES = {"scale": "scales", "power": "powers", "bias": "biases"}
# A grid does not grow beyond these values. LayerNormed logits are of size 1 to 10, so at a bias of 4 hardly any clamp
# still bends them.
WIDEST = {"scales": (1e-3, 1e3), "powers": (0.25, 16.0), "biases": (-4.0, 4.0)}


@dataclass(frozen=True)
class Grid:
    """Every (scale, power, bias) to try, and the target retentions (betas).

    >>> Grid((1, 2), (3,), (0, -0.5), betas=(0.95,)).shape
    (1, 2, 1, 2)
    """

    scales: tuple[float, ...]
    powers: tuple[float, ...]
    biases: tuple[float, ...]
    betas: tuple[float, ...] = ()
    clamp: Clamp = "gelu"
    ln_k: int | None = None
    widenings: int = 0  # number of times that it has grown beyond the configured grid

    @classmethod
    def configured(cls, search: SearchConfig, betas: Sequence[float] = ()) -> Grid:
        """Return the grid of a configuration, by default with all its betas."""
        scales, powers, biases = (grid_values(getattr(search, name)) for name in AXES.values())
        return cls(scales, powers, biases, tuple(betas) or search.all_betas(), search.clamp, search.ln_k)

    @classmethod
    def checked(cls, **keys: Any) -> Grid:
        """Return the grid of these keys of `search`; lists may be of any kind, and None means the default.

        Raises:
            InvalidInputError: for a value that is not valid in a configuration.
        """
        given = {name: keys[name] for name in ("clamp", "ln_k")}
        lists = {name: tuple(keys[name]) for name in (*AXES.values(), "betas") if keys[name] is not None}
        try:
            search = SearchConfig.checked(given | lists)
        except ConfigError as error:
            raise InvalidInputError(str(error)) from None
        return cls.configured(search, tuple(map(float, lists.get("betas", ()))))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(betas, scales, powers, biases): the shape of every array of a `Selection`."""
        return len(self.betas), len(self.scales), len(self.powers), len(self.biases)

    def on_edge(self, at: tuple[float, float, float]) -> tuple[str, ...]:
        """Return which of "scale", "power" and "bias" lie at an end of their list of two different values or more."""
        return tuple(
            name
            for (name, axis), value in zip(AXES.items(), at, strict=True)
            if min(values := getattr(self, axis)) < max(values) and value in (min(values), max(values))
        )

    def wider(self, *places: tuple[float, float, float]) -> Grid | None:
        """Return the grid, extended by half its values at each end on which a place lies; None if no end can grow.

        >>> Grid((1.0, 2.0), (1.0, 2.0, 3.0), (0.0,)).wider((2.0, 2.0, 0.0)).scales
        (1.0, 2.0, 4.0)
        """
        grown: dict[str, Any] = {}
        for i, (name, axis) in enumerate(AXES.items()):
            edges = {at[i] for at in places if name in self.on_edge(at)}
            if more := {value for edge in edges for value in self.beyond(axis, edge)}:
                grown[axis] = tuple(sorted({*getattr(self, axis), *more}))
        return replace(self, **grown, widenings=self.widenings + 1) if grown else None

    def beyond(self, axis: str, edge: float) -> tuple[float, ...]:
        """Return half as many new values as an axis has, beyond its end `edge` and within `WIDEST`.

        The spacing is that of the last two values: their ratio for scales, and their difference for powers and biases.
        """
        values, (low, high) = getattr(self, axis), WIDEST[axis]
        nearest = min((value for value in values if value != edge), key=lambda value: abs(value - edge))
        steps = range(1, len(values) // 2 + 1)
        found = (edge * (edge / nearest) ** i if axis == "scales" else edge + (edge - nearest) * i for i in steps)
        return tuple(value for value in found if low <= value <= high)

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        """Yield every candidate, in the order of the arrays' last three dimensions."""
        return ((s, p, c) for s in self.scales for p in self.powers for c in self.biases)


def kept_images(beta: float, n_images: int) -> int:
    """Return the smallest number of images whose exact share of `n_images` is at least `beta`, and at least 1.

    `beta` is taken as the decimal number that Python prints: 0.985 of 200 is 197, whatever its binary digits. beta = 0
    requires no image; one image is kept then, so that the margin threshold is the largest margin.

    >>> kept_images(0.985, 714)  # 703 of 714 would be a share of 0.98459
    704
    """
    return max(1, math.ceil(Fraction(str(float(beta))) * n_images))

"""What Algorithm 1 is given: the grid of candidates, the betas and the cached logits, checked once.

Shapes: B images, K classes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.transforms import Clamp, norm_statistics, require_clamp, resolve_ln_k
from .ordering import sort_rows


@dataclass(frozen=True)
class CandidateGrid:
    """Every (scale, power, bias) to try, for every beta."""

    scales: tuple[float, ...]
    powers: tuple[float, ...]
    biases: tuple[float, ...]
    betas: tuple[float, ...]

    @classmethod
    def checked(
        cls, *, scales: Iterable[float], powers: Iterable[float], biases: Iterable[float], betas: Iterable[float]
    ) -> "CandidateGrid":
        """The grid of these values.

        Raises:
            InvalidInputError: for an empty list, a scale or power that is not positive, a beta outside [0, 1].
        """
        grid = cls(_floats(scales), _floats(powers), _floats(biases), _floats(betas))
        for name, values in (("scales", grid.scales), ("powers", grid.powers)):
            _require_values(name, values, positive=True)
        _require_values("biases", grid.biases, positive=False)
        if not grid.betas:
            raise InvalidInputError("betas is empty: give at least one share of rob's correct images to keep")
        for beta in grid.betas:
            require_beta(beta)
        return grid

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(betas, scales, powers, biases): the shape of every array of a `Selection`."""
        return len(self.betas), len(self.scales), len(self.powers), len(self.biases)

    def on_edge(self, index: tuple[int, int, int]) -> tuple[str, ...]:
        """Which of scale, power and bias lie at an end of their list of two values or more."""
        axes = (("scale", self.scales), ("power", self.powers), ("bias", self.biases))
        return tuple(
            name
            for (name, values), i in zip(axes, index, strict=True)
            if len(values) > 1 and values[i] in (min(values), max(values))
        )


def kept_images(beta: float, n_images: int) -> int:
    """The smallest number of images that is a share of at least `beta`, exactly, and at least 1.

    `beta` counts as the decimal that it prints as: 0.985 of 200 is 197, whatever its binary digits. beta = 0 constrains
    nothing; one image is kept then, so that the cutoff is the largest margin that was seen.
    """
    return max(1, math.ceil(Fraction(str(float(beta))) * n_images))


def require_beta(beta: float) -> None:
    """Raises InvalidInputError unless `beta` is in [0, 1]."""
    if 0 <= beta <= 1:
        return
    hint = f"; it is a share, did you mean {float(Fraction(str(beta)) / 100)}?" if 1 < beta <= 100 else ""
    raise InvalidInputError(f"beta={beta} must be in [0, 1]{hint}")


def normed_logits(
    name: str, logits_BK: Tensor, *, clamp: Clamp, ln_k: int | None, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`logits_BK` in float64 after LayerNorm, and the same with each row in descending order.

    `like` has the number of classes and the device to agree with.

    Raises:
        InvalidInputError: for logits that are no (images, classes) table of at least 2 classes or that are not finite.
    """
    require_clamp(clamp)
    require_logits(name, logits_BK)
    if like is not None:
        if logits_BK.shape[1] != like.shape[1]:
            raise InvalidInputError(f"{name} has K={logits_BK.shape[1]} classes, the others have K={like.shape[1]}")
        logits_BK = logits_BK.to(like.device)
    width = resolve_ln_k(ln_k, logits_BK.shape[1])
    logits_BK = logits_BK.detach()
    sortable_BK = logits_BK if logits_BK.dtype == torch.float32 else logits_BK.double()
    descending_BK = sort_rows(sortable_BK).flip(-1).double()
    mean_B1, deviation_B1 = norm_statistics(descending_BK[:, :width])
    return (logits_BK.double() - mean_B1) / deviation_B1, (descending_BK - mean_B1) / deviation_B1


def require_logits(name: str, logits_BK: Tensor) -> None:
    """Raises InvalidInputError unless `logits_BK` is a finite table of at least 2 classes."""
    if logits_BK.ndim != 2 or logits_BK.shape[1] < 2:
        raise InvalidInputError(
            f"{name} must have the shape (images, classes) with at least 2 classes, got {tuple(logits_BK.shape)}"
        )
    if math.isfinite(logits_BK.sum(dtype=torch.float64)):
        return
    bad_B = ~torch.isfinite(logits_BK).all(dim=1)
    if bool(bad_B.any()):
        raise InvalidInputError(
            f"{name} is not finite (NaN or infinite) in {int(bad_B.sum())} of {len(bad_B)} rows, "
            f"the first is row {int(bad_B.nonzero()[0])}"
        )


def class_indices(name: str, index_B: Tensor, logits_BK: Tensor) -> Tensor:
    """`index_B` as int64 on the device of `logits_BK`.

    Raises:
        InvalidInputError: unless there is one class index in [0, K) for each row.
    """
    n_images, n_classes = logits_BK.shape
    if index_B.shape != (n_images,):
        raise InvalidInputError(f"{name} has shape {tuple(index_B.shape)}, expected ({n_images},): one class an image")
    index_B = index_B.to(device=logits_BK.device, dtype=torch.int64)
    if n_images and not 0 <= int(index_B.min()) <= int(index_B.max()) < n_classes:
        raise InvalidInputError(
            f"{name} spans {int(index_B.min())} to {int(index_B.max())}, the logits have K={n_classes} classes"
        )
    return index_B


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _require_values(name: str, values: tuple[float, ...], *, positive: bool) -> None:
    if not values:
        raise InvalidInputError(f"{name} is empty: give at least one candidate value")
    for value in values:
        if not math.isfinite(value) or (positive and value <= 0):
            raise InvalidInputError(f"{name} contains {value}; every value must be {'positive and ' * positive}finite")

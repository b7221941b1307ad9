"""Are the images normalised twice? A classifier still answers then, only badly; nobody notices but by its accuracy."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_NAMES = (("mean", "std"), ("mu", "sigma"))
_TOLERANCE = 1e-3


@torch.no_grad()
def normalised_twice(model: nn.Module, images_BCHW: Tensor) -> str | None:
    """A sentence where a module that subtracts a mean of its own receives values outside [0, 1], else None.

    A module counts if it holds a mean and a standard deviation per channel and its output changes with that mean:
    some classes hold them and never use them.
    """
    n_channels = images_BCHW.shape[1]
    for name, module, mean in _normalisers(model, n_channels):
        low, high = _range_received(model, module, images_BCHW)
        if (low < -_TOLERANCE or high > 1 + _TOLERANCE) and _is_used(model, mean, images_BCHW):
            where = f"its part {name!r} ({type(module).__name__})" if name else type(module).__name__
            return (
                f"the images are normalised twice: {where} subtracts a mean of its own, but receives values from "
                f"{low:.2f} to {high:.2f} for images in [0, 1]; take one of the two normalisations away"
            )
    return None


def _normalisers(model: nn.Module, n_channels: int) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, module in model.named_modules():
        for mean_name, std_name in _NAMES:
            mean, std = getattr(module, mean_name, None), getattr(module, std_name, None)
            if isinstance(mean, Tensor) and isinstance(std, Tensor) and mean.numel() == std.numel() == n_channels:
                yield name, module, mean


def _range_received(model: nn.Module, module: nn.Module, images: Tensor) -> tuple[float, float]:
    """Smallest and largest value that `module` is given in one pass; (0, 1) where it is not called."""
    seen: list[Tensor] = []

    def watch(_: nn.Module, arguments: tuple[object, ...]) -> None:
        seen.extend(value for value in arguments if isinstance(value, Tensor))

    handle = module.register_forward_pre_hook(watch)
    try:
        model(images)
    finally:
        handle.remove()
    return (min(float(x.min()) for x in seen), max(float(x.max()) for x in seen)) if seen else (0.0, 1.0)


def _is_used(model: nn.Module, mean: Tensor, images: Tensor) -> bool:
    before, kept = model(images), mean.clone()
    try:
        mean.add_(0.25)
        return not torch.equal(model(images), before)
    finally:
        mean.copy_(kept)

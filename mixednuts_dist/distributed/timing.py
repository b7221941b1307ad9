"""How long a pass takes, measured on a few batches.

Shapes: B images of C x H x W, K classes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.gradient_model import AttackedModel
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitTransform

_ENOUGH_SECONDS = 1.0  # of repeats


@dataclass(frozen=True)
class PassSeconds:
    """Seconds an image, in a full batch."""

    forward: float
    both: float  # forward and backward

    def of(self, n_forward: int, n_backward: int) -> float:
        """Seconds that an image takes with so many passes, each backward one with its forward one."""
        return (n_forward - n_backward) * self.forward + n_backward * self.both


def time_classifiers(networks: Mapping[str, nn.Module], x_BCHW: Tensor) -> dict[str, PassSeconds]:
    """The base classifiers and, of "std" and "rob", their mixture, whose parameters do not change its cost."""
    models = {name: AttackedModel.of(network) for name, network in networks.items()}
    if "std" in networks:
        mixed = MixedClassifier(networks["std"], networks["rob"], LogitTransform(1.0, 1.0, 0.0), 0.9).eval()
        models["mixed"] = AttackedModel.of(mixed.to(x_BCHW.device))
    return {name: _time(model, x_BCHW) for name, model in models.items()}


def _time(attacked: AttackedModel, x_BCHW: Tensor) -> PassSeconds:
    def forward() -> None:
        with torch.no_grad():
            attacked.model(x_BCHW)

    def both() -> None:
        attacked.fast.probe(x_BCHW)

    return PassSeconds(_seconds(forward, x_BCHW) / len(x_BCHW), _seconds(both, x_BCHW) / len(x_BCHW))


def _seconds(act: Callable[[], Any], x_BCHW: Tensor) -> float:
    """Median of repeats, after one that warms up."""
    times: list[float] = []
    act()
    while sum(times) < _ENOUGH_SECONDS and len(times) < 20:
        _synchronise(x_BCHW)
        started = time.perf_counter()
        act()
        _synchronise(x_BCHW)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _synchronise(x_BCHW: Tensor) -> None:
    if x_BCHW.is_cuda:
        torch.cuda.synchronize(x_BCHW.device)

"""Measure how long passes through a run's classifiers take, for cost estimates."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.precision import FastCopies
from ..attacks.gradient_model import AttackedModel

_ENOUGH_SECONDS, _MOST_REPEATS = 1.0, 20


@dataclass(frozen=True)
class PassSeconds:
    """Seconds per image in a full batch."""

    forward: float
    both: float  # forward and backward

    def of(self, n_forward: int, n_backward: int) -> float:
        """Return the seconds per image for these numbers of passes; each backward pass includes a forward pass."""
        return (n_forward - n_backward) * self.forward + n_backward * self.both


def time_classifiers(networks: Mapping[str, nn.Module], x_BCHW: Tensor, copies: FastCopies) -> dict[str, PassSeconds]:
    """Time the base classifiers. If there are two, the time of their mixed classifier ("mixed") is the sum of both.

    The passes go through the fast copies, as nearly all passes of a run do.
    """
    found = {
        name: _time(AttackedModel.of(network, copies=copies, like_BCHW=x_BCHW, rows=len(x_BCHW)), x_BCHW)
        for name, network in networks.items()
    }
    if "std" in found:
        found["mixed"] = PassSeconds(
            forward=sum(each.forward for each in found.values()), both=sum(each.both for each in found.values())
        )
    return found


def _time(attacked: AttackedModel, x_BCHW: Tensor) -> PassSeconds:
    forward = _seconds(lambda: attacked.fast.evaluate(x_BCHW, None), x_BCHW)
    both = _seconds(lambda: attacked.fast.probe(x_BCHW), x_BCHW)
    return PassSeconds(forward / len(x_BCHW), both / len(x_BCHW))


def _seconds(act: Callable[[], Any], x_BCHW: Tensor) -> float:
    """Return the median seconds of several calls, after one call as a warm-up."""
    times: list[float] = []
    act()
    synchronize: Callable[[], object] = torch.cuda.synchronize if x_BCHW.is_cuda else lambda: None
    while sum(times) < _ENOUGH_SECONDS and len(times) < _MOST_REPEATS:
        synchronize()
        started = time.perf_counter()
        act()
        synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]

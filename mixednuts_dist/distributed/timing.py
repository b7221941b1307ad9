"""Measure how long passes through a run's classifiers take, for cost estimates."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.precision import FastCopies
from ..attacks.gradient_model import AttackedModel


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
    found = {}
    for name, network in networks.items():
        fast = AttackedModel.of(network, copies=copies, like_BCHW=x_BCHW, rows=len(x_BCHW)).fast
        forward, both = (
            _seconds(partial(fast.evaluate, x_BCHW, None), x_BCHW),
            _seconds(partial(fast.probe, x_BCHW), x_BCHW),
        )
        found[name] = PassSeconds(forward / len(x_BCHW), both / len(x_BCHW))
    if "std" in found:
        std, rob = found["std"], found["rob"]
        found["mixed"] = PassSeconds(std.forward + rob.forward, std.both + rob.both)
    return found


def _seconds(act: Callable[[], Any], x_BCHW: Tensor) -> float:
    """Return the mean seconds of up to 20 calls in about a second, after one call as a warm-up."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if x_BCHW.is_cuda else lambda: None
    act()
    synchronize()
    started, n_calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < 1.0 and n_calls < 20:
        act()
        synchronize()
        n_calls += 1
    return taken / n_calls

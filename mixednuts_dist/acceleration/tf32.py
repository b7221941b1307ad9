"""Set torch's switches for the rounding of float32 products for a block of passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

# Since torch 2.9 each kind of product has a separate switch. The older switches are set as well, because torch refuses
# to read them while they contradict the newer ones, and foreign code in a pass may read them.
_NEWER_CUDA = ("cudnn.conv", "cudnn.rnn", "cuda.matmul")
_NEWER_CPU = ("mkldnn.conv", "mkldnn.rnn", "mkldnn.matmul")

_Switch = tuple[Callable[[], Any], Callable[[Any], None], Any, Any]  # read, write, value without TF32, value with TF32


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for float32 products, and use deterministic kernels that are chosen without timing.

    On a CPU, the block always computes products in full float32, even after `torch.set_float32_matmul_precision`.
    """
    before: list[tuple[Callable[[Any], None], Any]] = []
    for read, write, _, _ in _switches():
        with suppress(RuntimeError):  # torch cannot read an older switch that contradicts a newer one
            before.append((write, read()))
    for _, write, strict, tf32 in _switches():
        write(tf32 if allowed else strict)
    try:
        yield
    finally:
        for write, value in before:
            write(value)


@cache
def _switches() -> tuple[_Switch, ...]:
    """The older switches first: writing one of them overwrites some of the newer ones."""

    def of(path: str, name: str, strict: Any, tf32: Any) -> _Switch:
        owner = attrgetter(path)(torch.backends)
        return partial(getattr, owner, name), partial(setattr, owner, name), strict, tf32

    switches = [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high"),
        of("cudnn", "allow_tf32", False, True),
        of("cudnn", "deterministic", True, True),
        of("cudnn", "benchmark", False, False),
    ]
    if hasattr(torch.backends, "fp32_precision"):
        switches += [of(path, "fp32_precision", "ieee", "tf32") for path in _NEWER_CUDA]
        switches += [of(path, "fp32_precision", "ieee", "ieee") for path in _NEWER_CPU]
    return tuple(switches)

"""Fast copies of the base networks for the attacks' gradients: in float32, TF32 or bfloat16.

The package copies only the networks. It computes LayerNorm, the transformation, mixing and losses in float64 and
float32. The float32 original verifies every result.
"""

import copy
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitMap
from .batch_shape import ON_CPU, as_out_of_memory, fastest_of_three, repeated
from .gradient_copy import Bfloat16Copy, agrees, folded, frozen_copy, input_gradient, is_heavy, points_alike
from .tf32 import tf32_allowed

Precision = Literal["fp32", "tf32", "bf16"]
PrecisionChoice = Literal["fp32", "tf32", "bf16", "auto"]

MIN_SPEEDUP = 1.1  # a precision is preferred to float32 if a pass is this many times as fast; less is timing noise
MIN_SPEEDUP_OVER_TF32 = 1.5  # the same for bfloat16 and TF32, because attacks in bfloat16 end with runs in TF32

_N_LOGITS_COMPARED, _N_GRADIENTS_COMPARED = 16, 4  # images on which a copy is compared with its original
_BF16_TOLERANCE = 0.1  # share of the largest logit; a larger difference is not rounding

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FastCopy:
    """A network, or a classifier on copied networks; both fields may hold the original if no copy is faster."""

    fast: Any  # for the gradients of most runs
    float32: Any  # for the gradients of float32 runs, in TF32 on a GPU
    precisions: tuple[Precision, ...]  # one per network

    @property
    def precision(self) -> Precision:
        """The precision of the only network."""
        (precision,) = self.precisions
        return precision


class FastCopies:
    """Makes one `FastCopy` per base network and keeps it. The weights must not change while the copies are in use.

    Args:
        precision: the precision of gradients. "auto" times the precisions that the hardware supports, and uses float32
            unless another one is more than `MIN_SPEEDUP` times as fast.
        compile: compile the copies with torch.compile, and use CUDA graphs on a GPU.

    Example:
        >>> FastCopies("bf16").of_network(nn.Linear(4, 3), torch.rand(8, 4)).precision
        'bf16'
    """

    def __init__(self, precision: PrecisionChoice = "auto", *, compile: bool = False) -> None:
        if precision not in get_args(PrecisionChoice):
            raise InvalidInputError(
                f"precision={precision!r} is not known; valid precisions: {', '.join(get_args(PrecisionChoice))}"
            )
        self.precision, self.compile = precision, compile
        self._copies: dict[nn.Module, FastCopy] = {}  # by network
        self._decided: dict[nn.Module, Precision] = {}

    def decide(self, network: nn.Module, precision: Precision) -> None:
        """Use this precision for the network without a measurement, because a run decides once for all workers."""
        self._decided[network] = precision

    def of_model(self, model: Callable[[Tensor], Tensor], x_BCHW: Tensor, rows: int = ON_CPU) -> FastCopy:
        """Return the classifier on fast copies of its base networks, which are checked on some of the images `x_BCHW`.

        The base networks are those of a mixed classifier, the first part of `nn.Sequential(network, logit map)`, or
        the module itself. A function that is not a torch module is returned as it is.

        Raises:
            InvalidInputError: for such a function and the precision "tf32" or "bf16".
        """
        if isinstance(model, MixedClassifier):
            children: tuple[str, ...] = ("std", "rob")
        elif isinstance(model, nn.Sequential) and len(model) == 2 and isinstance(model[1], LogitMap):
            children = ("0",)
        elif isinstance(model, nn.Module):
            return self.of_network(model, x_BCHW, rows)
        elif self.precision in ("auto", "fp32"):
            return FastCopy(model, model, ("fp32",))
        else:
            raise InvalidInputError(
                f"precision={self.precision!r} needs a torch module to copy, not {type(model).__name__}; "
                "wrap the function in an nn.Module, or leave the precision to auto"
            )
        copies = {child: self.of_network(model.get_submodule(child), x_BCHW, rows) for child in children}
        return FastCopy(
            _with_networks(model, {child: each.fast for child, each in copies.items()}),
            _with_networks(model, {child: each.float32 for child, each in copies.items()}),
            tuple(each.precision for each in copies.values()),
        )

    def of_network(self, network: nn.Module, x_BCHW: Tensor, rows: int = ON_CPU) -> FastCopy:
        """Return the copy of one network."""
        if network not in self._copies:
            self._copies[network] = self._copied(network, x_BCHW.detach(), rows)
        return self._copies[network]

    def _copied(self, network: nn.Module, x: Tensor, rows: int) -> FastCopy:
        if not is_heavy(network):
            return FastCopy(network, network, ("fp32",))
        precision = self._decided.get(network, self.precision)
        copied = _made(network, x, fastest_precision(network, x, rows) if precision == "auto" else precision)
        if self.compile:  # for one batch shape
            fast = frozen_copy(network) if copied.fast is network else copied.fast
            mode = "reduce-overhead" if x.is_cuda else None  # CUDA graphs
            copied = replace(copied, fast=torch.compile(fast, dynamic=False, mode=mode))
        return copied


def _made(network: nn.Module, x: Tensor, precision: Precision) -> FastCopy:
    """Return a copy that agrees with its original; in float32 if device or network do not support `precision`."""
    x = x[:_N_LOGITS_COMPARED]
    float32 = folded(network, x, channels_last=not x.is_cuda or precision != "fp32")
    if precision == "bf16":
        try:
            low = Bfloat16Copy(frozen_copy(float32), x)
            if agrees(low, network, x, _BF16_TOLERANCE) and points_alike(low, network, x[:_N_GRADIENTS_COMPARED]):
                return FastCopy(low, float32, ("bf16",))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # foreign code: a layer may insist on one dtype, or inspect another layer
            _logger.info("%s in bfloat16: %s", type(network).__name__, error)
        _logger.warning("precision=bf16: %s does not work in bfloat16; float32 instead", type(network).__name__)
    elif precision == "tf32" and not _has_tensor_cores(x.device):
        _logger.warning("precision=tf32: the device %s has none; float32 instead", x.device)
    elif precision == "tf32":
        return FastCopy(float32, float32, ("tf32",))
    return FastCopy(float32, float32, ("fp32",))


# Results of `fastest_precision`: network -> (device, rows, shape of the images) -> precision. They are kept, because
# timing is noisy, and two equal calls should compute in the same precision.
_FASTEST = weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int, tuple[int, ...]], Precision]]()


def fastest_precision(network: nn.Module, x: Tensor, rows: int) -> Precision:
    """Return the precision in which passes over `rows` images like these are fastest on this device."""
    key, known = (str(x.device), rows, tuple(x.shape[1:])), _FASTEST.setdefault(network, {})
    if key in known or not (_has_tensor_cores(x.device) if x.is_cuda else _has_bfloat16_units()):
        return known.get(key, "fp32")
    choices: list[Precision] = ["fp32", "bf16", "tf32"] if x.is_cuda else ["fp32", "bf16"]
    copies = {precision: _made(network, x, precision).fast for precision in choices}
    try:
        taken = {precision: _seconds(fast, repeated(x, rows), precision) for precision, fast in copies.items()}
    except torch.OutOfMemoryError:  # `rows` do not fit in float32; the run will halve them
        torch.cuda.empty_cache()
        taken = {precision: _seconds(fast, x[:1], precision) for precision, fast in copies.items()}
    if "tf32" in taken:
        taken["bf16"] *= MIN_SPEEDUP_OVER_TF32
    best = min(taken, key=lambda precision: taken[precision])
    known[key] = best if MIN_SPEEDUP * taken[best] < taken["fp32"] else "fp32"
    return known[key]


@torch.enable_grad()
def _seconds(network: nn.Module, x: Tensor, precision: Precision) -> float:
    """Time a forward and backward pass."""

    def both_ways() -> Tensor:
        leaf = x.clone().requires_grad_()
        return input_gradient(network(leaf).sum(), leaf)

    with tf32_allowed(precision == "tf32"), as_out_of_memory():
        return fastest_of_three(both_ways)


def _has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU has units for TF32 and bfloat16: compute capability 8.0 (Ampere) and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_bfloat16_units() -> bool:
    """Return whether a convolution takes this CPU less time in bfloat16 than in float32.

    With hardware units for bfloat16, it takes a quarter of the time, and otherwise four times the time. The function
    measures this instead of reading the CPU's flags, because users may restrict oneDNN (ONEDNN_MAX_CPU_ISA). With 8
    images, another process that uses the units does not hide the difference; with one image, it sometimes did.
    """

    def seconds(dtype: torch.dtype) -> float:
        x_BCHW, weight = (torch.ones(shape, dtype=dtype) for shape in ((8, 64, 16, 16), (64, 64, 3, 3)))
        x_BCHW, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x_BCHW, weight))
        return fastest_of_three(lambda: F.conv2d(x_BCHW, weight, padding=1))

    return MIN_SPEEDUP * seconds(torch.bfloat16) < seconds(torch.float32)


def _with_networks(model: nn.Module, networks: dict[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of the module with these networks as its children."""
    changed = copy.copy(model)
    changed._modules = {**model._modules, **networks}
    return changed

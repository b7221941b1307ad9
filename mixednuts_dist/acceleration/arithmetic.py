"""How the attacks' gradients are computed: on fast copies of the base networks, in float32, TF32 or bfloat16.

Only the networks are copied. LayerNorm, the transformation, mixing and the losses stay in float64 and float32. A result
that a copy shows counts only after the float32 original has verified it; the engine sees to that.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitMap
from .batch_shape import ON_CPU, as_out_of_memory, fastest_of_three, release_memory, repeated
from .gradient_copy import (
    Bfloat16Copy,
    agrees,
    compiled,
    folded,
    frozen_copy,
    input_gradient,
    is_heavy,
    points_alike,
)
from .tf32 import tf32_allowed

Precision = Literal["fp32", "tf32", "bf16"]
PrecisionChoice = Literal["fp32", "tf32", "bf16", "auto"]

MIN_SPEEDUP = 1.1
"""A precision is preferred to float32 where a pass is so many times as fast: less is within the noise of a timing."""

_N_LOGITS_COMPARED, _N_GRADIENTS_COMPARED = 16, 4  # images on which a copy is compared with its original
_BF16_TOLERANCE = 0.1  # of the largest logit: more is not rounding

_logger = logging.getLogger(__name__)


class Arithmetic:
    """Makes the copies, one for each base network, and keeps them.

    Args:
        precision: of the gradients. "auto" takes the fastest of those that the device computes in hardware, timed on
            each network at the rows of the run's passes; float32 unless another one is `MIN_SPEEDUP` times as fast.
        compile: copies go through torch.compile, with CUDA graphs on a GPU.

    The networks' weights must not change while it is in use.

    Example:
        >>> Arithmetic("bf16").network_copy(nn.Linear(4, 3), torch.rand(8, 4)).precision
        'bf16'
    """

    def __init__(self, precision: PrecisionChoice = "auto", *, compile: bool = False) -> None:
        if precision not in get_args(PrecisionChoice):
            raise InvalidInputError(
                f"precision={precision!r} is not known; valid precisions: {', '.join(get_args(PrecisionChoice))}"
            )
        self.precision, self.compile = precision, compile
        self._networks: dict[int, NetworkCopy] = {}
        self._decided: weakref.WeakKeyDictionary[nn.Module, Precision] = weakref.WeakKeyDictionary()

    def decide(self, network: nn.Module, precision: Precision) -> None:
        """Use this precision for the network instead of measuring: a run decides once for all its workers."""
        self._decided[network] = precision

    def copy_of(self, model: Callable[[Tensor], Tensor], x_BCHW: Tensor, rows: int = ON_CPU) -> "ModelCopy":
        """The same function with its base networks replaced by fast copies, compared on some of the images `x_BCHW`.

        It looks into a mixed classifier and into `nn.Sequential(network, logit map)`; any other module is one network.

        Raises:
            InvalidInputError: for a function that is no torch module: there is nothing to copy.
        """
        if isinstance(model, MixedClassifier):
            return self._model_copy(model, ("std", "rob"), x_BCHW, rows)
        if isinstance(model, nn.Sequential) and len(model) == 2 and isinstance(model[1], LogitMap):
            return self._model_copy(model, ("0",), x_BCHW, rows)
        if isinstance(model, nn.Module):
            network = self.network_copy(model, x_BCHW, rows)
            return ModelCopy(network.made, network.finer, (network,))
        raise InvalidInputError(
            f"precision={self.precision!r} needs a torch module to copy, not {type(model).__name__}; "
            "wrap the function in an nn.Module, or leave the precision to auto"
        )

    def _model_copy(self, model: nn.Module, children: Sequence[str], x: Tensor, rows: int) -> "ModelCopy":
        networks = {child: self.network_copy(model.get_submodule(child), x, rows) for child in children}
        made = _with_networks(model, {child: copied.made for child, copied in networks.items()})
        finer = _with_networks(model, {child: copied.finer for child, copied in networks.items()})
        return ModelCopy(made, finer, tuple(networks.values()))

    def network_copy(self, network: nn.Module, x_BCHW: Tensor, rows: int = ON_CPU) -> "NetworkCopy":
        """The copy of one network, with the precision that was chosen for it."""
        if id(network) not in self._networks:
            self._networks[id(network)] = self._copied(network, x_BCHW.detach(), rows)
        return self._networks[id(network)]

    def _copied(self, network: nn.Module, x: Tensor, rows: int) -> "NetworkCopy":
        if not is_heavy(network):
            return NetworkCopy(network, network, network, "fp32")
        precision = self._decided.get(network, self.precision)
        copied = _fastest(network, x, rows) if precision == "auto" else _made(network, x, precision)
        if self.compile:
            made = frozen_copy(network) if copied.made is network else copied.made
            copied = replace(copied, made=compiled(made, x.device))
        return copied


@dataclass(frozen=True)
class NetworkCopy:
    """A network and the copies that its gradients are computed on; the network itself where no copy is faster."""

    network: nn.Module
    made: nn.Module
    finer: nn.Module  # the float32 copy, for the last steps of an attack whose first steps were in a coarser precision
    precision: Precision


@dataclass(frozen=True)
class ModelCopy:
    """A classifier on copies of its networks."""

    model: Any
    finer: Any  # on their float32 copies
    networks: tuple[NetworkCopy, ...]

    @property
    def coarse(self) -> bool:
        """Whether a network computes below float32."""
        return any(copied.precision != "fp32" for copied in self.networks)

    @property
    def tf32(self) -> bool:
        return any(copied.precision == "tf32" for copied in self.networks)


def _made(network: nn.Module, x: Tensor, precision: Precision) -> NetworkCopy:
    """A copy that was compared with its original; in float32 where the device or the network cannot do better."""
    x = x[:_N_LOGITS_COMPARED]
    finer = folded(network, x)
    if precision == "bf16":
        coarse = _bfloat16_copy(finer, network, x)
        if coarse is not None:
            return NetworkCopy(network, coarse, finer, "bf16")
        _logger.warning("precision=bf16: %s does not work in bfloat16; float32 instead", type(network).__name__)
    elif precision == "tf32" and not _has_tensor_cores(x.device):
        _logger.warning("precision=tf32: the device %s has none; float32 instead", x.device)
    elif precision == "tf32":
        return NetworkCopy(network, finer, finer, "tf32")
    return NetworkCopy(network, finer, finer, "fp32")


def _bfloat16_copy(base: nn.Module, network: nn.Module, x: Tensor) -> Bfloat16Copy | None:
    """A copy of `base`, if it gives the logits of `network` and gradients in about the same direction."""
    try:
        made = Bfloat16Copy(frozen_copy(base), x)
        alike = agrees(made, network, x, _BF16_TOLERANCE) and points_alike(made, network, x[:_N_GRADIENTS_COMPARED])
        return made if alike else None
    except torch.OutOfMemoryError:
        raise  # says nothing about bfloat16
    except Exception as error:  # foreign code: a layer may insist on one dtype, or look into another one
        _logger.info("%s in bfloat16: %s", type(network).__name__, error)
        return None


def _fastest(network: nn.Module, x: Tensor, rows: int) -> NetworkCopy:
    """The copy in the precision that is fastest; the answer is remembered for the network's next copy."""
    key = (str(x.device), rows, tuple(x.shape[1:]))
    known = _FASTEST.setdefault(network, {})
    if key in known:
        return _made(network, x, known[key])
    copies = {precision: _made(network, x, precision) for precision in _in_hardware(x.device)}
    batch = repeated(x, rows)
    try:
        known[key] = _faster(copies, batch)
    except torch.OutOfMemoryError:  # `rows` do not fit in float32; the run will halve them
        release_memory()
        known[key] = _faster(copies, batch[:1])
    return copies[known[key]]


_FASTEST: "weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int, tuple[int, ...]], Precision]]"
_FASTEST = weakref.WeakKeyDictionary()


def _faster(copies: dict[Precision, NetworkCopy], batch: Tensor) -> Precision:
    """The precision whose copy passes the batch fastest; float32, untimed, where it is the only one."""
    if len(copies) == 1:
        return "fp32"
    seconds = {precision: _seconds(copied.made, batch, precision) for precision, copied in copies.items()}
    best = min(seconds, key=lambda precision: seconds[precision])
    return best if MIN_SPEEDUP * seconds[best] < seconds["fp32"] else "fp32"


@torch.enable_grad()
def _seconds(network: nn.Module, x: Tensor, precision: Precision) -> float:
    """Of a pass forward and, where there is a gradient, backward."""

    def both_ways() -> Tensor:
        leaf = x.clone().requires_grad_()
        return input_gradient(network(leaf).sum(), leaf)

    with tf32_allowed(precision == "tf32"), as_out_of_memory():
        return fastest_of_three(both_ways)


def _in_hardware(device: torch.device) -> list[Precision]:
    """The precisions that the device computes in units of their own: float32, and what may be faster than it."""
    if device.type == "cuda":
        return ["fp32", "bf16", "tf32"] if _has_tensor_cores(device) else ["fp32"]
    if device.type == "cpu" and not _has_bfloat16_units():
        return ["fp32"]
    return ["fp32", "bf16"]


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether it is a GPU with units for TF32 and bfloat16: compute capability 8.0 (Ampere) and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_bfloat16_units() -> bool:
    """Whether a convolution takes this CPU less time in bfloat16 than in float32.

    One small layer is timed, some milliseconds in all, so that no copy is made where bfloat16 is emulated: it takes
    half the time of float32 where there are units for it and four times the time elsewhere. The CPU's flags do not
    say it, because oneDNN may be restricted (ONEDNN_MAX_CPU_ISA).
    """
    return MIN_SPEEDUP * _layer_seconds(torch.bfloat16) < _layer_seconds(torch.float32)


def _layer_seconds(dtype: torch.dtype) -> float:
    """CPU time of the fastest of three convolutions of 64 channels."""
    x_BCHW = torch.ones(1, 64, 16, 16, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return fastest_of_three(lambda: F.conv2d(x_BCHW, weight, padding=1))


def _with_networks(model: nn.Module, networks: dict[str, nn.Module]) -> nn.Module:
    """A shallow copy of the module with other children; the original keeps its own."""
    changed = copy.copy(model)
    changed._modules = {**model._modules, **networks}
    return changed

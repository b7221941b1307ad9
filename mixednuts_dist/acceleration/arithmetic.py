"""How the attacks' gradients are computed: on fast copies of the base networks, in float32, TF32 or bfloat16.

Only the networks are copied. LayerNorm, the transformation, mixing and the losses stay in float64 and float32, and
nothing counts that only a copy has shown: the engine has the float32 original verify it.
"""

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitMap
from .batch_shape import ON_CPU, release_memory
from .gradient_copy import Bfloat16Copy, agrees, compiled, folded, frozen_copy, fused_in_float32, is_heavy, points_alike

Precision = Literal["fp32", "tf32", "bf16"]
PrecisionChoice = Literal["fp32", "tf32", "bf16", "auto"]

_CHECKED, _POINTED = 16, 4  # images on which a copy's logits, and its gradients, are held against the original's
_CLEARLY = 0.9  # of the seconds of float32: what takes longer is no reason to leave it, and noise cannot flip that
_BF16_TOLERANCE = 0.1  # of the largest logit: more is not rounding

_logger = logging.getLogger(__name__)


class Arithmetic:
    """Makes the copies, once for each base network, and remembers them as long as it lives.

    Args:
        precision: of the gradients. "auto" times what the device has on each network, at the rows of the run's passes,
            and leaves float32 where something is clearly faster, by a tenth.
        compile: copies go through torch.compile, with CUDA graphs on a GPU.

    The networks' weights must not change meanwhile.

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
        self._decided: dict[int, Precision] = {}

    def decide(self, network: nn.Module, precision: Precision) -> None:
        """Take this precision for the network, whatever "auto" would find: a run decides once for all its workers."""
        self._decided[id(network)] = precision

    def copy_of(self, model: Callable[[Tensor], Tensor], x_BCHW: Tensor, rows: int = ON_CPU) -> "ModelCopy":
        """The same function with its base networks replaced by fast copies, tried on some of the images `x_BCHW`.

        Looks into a mixed classifier and into `nn.Sequential(network, logit map)`; any other module is one network.

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
        """The copy of one network; `precision` tells what was chosen for it."""
        if id(network) not in self._networks:
            self._networks[id(network)] = self._copied(network, x_BCHW.detach(), rows)
        return self._networks[id(network)]

    def _copied(self, network: nn.Module, x: Tensor, rows: int) -> "NetworkCopy":
        if not is_heavy(network):
            return NetworkCopy(network, network, network, "fp32")
        precision = self._decided.get(id(network), self.precision)
        copied = _fastest(network, x, rows) if precision == "auto" else _made(network, x[:_CHECKED], precision)
        if self.compile:
            made = frozen_copy(network) if copied.made is network else copied.made
            copied = replace(copied, made=compiled(made, x.device))
        return copied


@dataclass(frozen=True)
class NetworkCopy:
    """A network and what its gradients are computed on; the same module where nothing faster was found."""

    network: nn.Module
    made: nn.Module
    finer: nn.Module  # in float32, for the last steps after coarser gradients
    precision: Precision


@dataclass(frozen=True)
class ModelCopy:
    """A classifier on copies of its networks."""

    model: Any
    finer: Any  # on their float32 copies
    networks: tuple[NetworkCopy, ...]

    @property
    def exact(self) -> bool:
        """Whether it gives the same bits as the original: none of its networks was changed."""
        return not self.coarse and all(copied.made is copied.network for copied in self.networks)

    @property
    def coarse(self) -> bool:
        """Whether a network computes below float32."""
        return any(copied.precision != "fp32" for copied in self.networks)

    @property
    def tf32(self) -> bool:
        return any(copied.precision == "tf32" for copied in self.networks)


def _made(network: nn.Module, x: Tensor, precision: Precision) -> NetworkCopy:
    """A verified copy; in float32 where the device or the network cannot do better."""
    base = folded(network, x)
    finer = fused_in_float32(base, network, x)
    if precision == "bf16":
        for fuse in (True, False):
            coarse = _bfloat16_copy(base, network, x, fuse)
            if coarse is not None:
                return NetworkCopy(network, coarse, finer, "bf16")
        _logger.warning("precision=bf16: %s does not work in bfloat16; float32 instead", type(network).__name__)
    elif precision == "tf32" and not _has_tf32(x.device):
        _logger.warning("precision=tf32: the device %s has none; float32 instead", x.device)
    elif precision == "tf32":
        return NetworkCopy(network, base, base, "tf32")
    made = network if base is network else finer  # without batch normalisation, the same bits
    return NetworkCopy(network, made, made, "fp32")


def _bfloat16_copy(base: nn.Module, network: nn.Module, x: Tensor, fuse: bool) -> Bfloat16Copy | None:
    """A copy of `base`, if it gives the logits of `network` and gradients that point its way."""
    try:
        made = Bfloat16Copy(frozen_copy(base), x, fuse=fuse)
        alike = agrees(made, network, x, _BF16_TOLERANCE) and points_alike(made, network, x[:_POINTED])
        return made if alike else None
    except torch.OutOfMemoryError:
        raise  # says nothing about bfloat16
    except Exception as error:  # a layer that insists on one dtype, or looks into another one: it is foreign code
        _logger.info("%s in bfloat16: %s", type(network).__name__, error)
        return None


def _fastest(network: nn.Module, x: Tensor, rows: int) -> NetworkCopy:
    """Float32, or the faster precision that is faster by a tenth; the answer is kept for the network's next copy."""
    key = (str(x.device), rows, tuple(x.shape[1:]))
    known = _FASTEST.setdefault(network, {})
    if key in known:
        return _made(network, x[:_CHECKED], known[key])
    candidates: list[Precision] = ["fp32", "bf16", "tf32"] if _has_tf32(x.device) else ["fp32", "bf16"]
    copies = {precision: _made(network, x[:_CHECKED], precision) for precision in candidates}
    batch = x[torch.arange(rows) % len(x)]
    try:
        seconds = {precision: _seconds(copied.made, batch, precision) for precision, copied in copies.items()}
    except torch.OutOfMemoryError:  # `rows` do not fit in float32; the run will halve them
        release_memory()
        batch = batch[:1]
        seconds = {precision: _seconds(copied.made, batch, precision) for precision, copied in copies.items()}
    best = min(seconds, key=lambda precision: seconds[precision])
    known[key] = best if seconds[best] < _CLEARLY * seconds["fp32"] else "fp32"
    return copies[known[key]]


_FASTEST: "weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int, tuple[int, ...]], Precision]]"
_FASTEST = weakref.WeakKeyDictionary()


def _seconds(network: nn.Module, x: Tensor, precision: Precision, repeats: int = 3) -> float:
    """The fastest of a few passes forward and backward; on a CPU, which others may use too, in CPU time."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    found = []
    with tf32_allowed(precision == "tf32"):
        for _ in range(repeats + 1):  # the first one warms up
            started = clock()
            leaf = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(network(leaf).sum(), leaf)
            float(grad.flatten()[0])  # waits for an accelerator
            found.append(clock() - started)
    return min(found[1:])


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Whether CUDA may round the factors of float32 products to TF32, in here; torch's own default is: convolutions.

    Convolutions also keep to kernels that give the same bits each time, as an image's result promises.
    """
    if not torch.cuda.is_available():
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = allowed
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = before


def _with_networks(model: nn.Module, networks: dict[str, nn.Module]) -> nn.Module:
    """A shallow copy of the module with other children; the original keeps its own."""
    changed = copy.copy(model)
    changed._modules = {**model._modules, **networks}
    return changed

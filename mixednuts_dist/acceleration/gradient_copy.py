"""A frozen copy of a network, made for gradients with respect to images.

Shapes: B images of C x H x W, K classes.
"""

import copy
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.modules.batchnorm import _BatchNorm

from .tf32 import tf32_allowed

_FOLD_TOLERANCE = 1e-4  # of the largest logit
_SAME_WAY = 0.5  # cosine between two gradients: of six networks with trained weights it was .976 at least in bfloat16
_TINY = 1e-300
_HEAVY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # what autocast runs in bfloat16

_logger = logging.getLogger(__name__)


class Bfloat16Copy(nn.Module):
    """Float32 images in, float32 logits out; products in bfloat16 and images in channels-last between.

    It takes the network over: weights of convolutions and linear layers are stored in bfloat16, so that they are
    rounded once and not at every pass. What sees the images, normalisation and the first layer, stays in float32:
    bfloat16 has 8 bits, a pixel too, so that a perturbation of eps would be a few of its steps.
    """

    def __init__(self, network: nn.Module, x_BCHW: Tensor) -> None:
        super().__init__()
        first = _first_heavy(network, x_BCHW[:1])
        for name, layer in list(network.named_modules()):
            if isinstance(layer, _HEAVY) and name != first:
                layer.to(torch.bfloat16)
        if first:
            parent, _, own = first.rpartition(".")
            setattr(network.get_submodule(parent), own, _RoundedAfter(network.get_submodule(first)))
        self.network = network.to(memory_format=torch.channels_last)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        with torch.autocast(x_BCHW.device.type, torch.bfloat16):
            logits_BK: Tensor = self.network(x_BCHW)
        return logits_BK.float()


class _RoundedAfter(nn.Module):
    """A layer in float32, its output in bfloat16: left in float32 it would keep the residual sums after it there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.float())
        return out.to(torch.bfloat16)


@torch.no_grad()
def _first_heavy(network: nn.Module, x_BCHW: Tensor) -> str:
    """The name of the heavy layer that is passed first; empty where it is the network itself."""
    passed: list[str] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: passed.append(name))
        for name, layer in network.named_modules()
        if isinstance(layer, _HEAVY)
    ]
    network(x_BCHW)
    for hook in hooks:
        hook.remove()
    return passed[0] if passed else ""


def is_heavy(network: nn.Module) -> bool:
    """Whether there is anything to gain: a classifier behind an interface has no layers of its own."""
    return any(isinstance(layer, _HEAVY) for layer in network.modules())


def frozen_copy(network: nn.Module) -> nn.Module:
    """In evaluation mode, its weights without gradients."""
    return copy.deepcopy(network).eval().requires_grad_(False)


def folded(network: nn.Module, x_BCHW: Tensor) -> nn.Module:
    """Return a frozen float32 copy whose passes are faster, or `network` itself if there is none.

    Batch normalization is folded into the convolutions. On a CPU the weights of convolutions are in channels-last
    format, and so is everything that passes through them: on six networks with and without batch normalization this
    was never slower by more than a timing's noise, and up to 40% faster. The format is fixed and not timed, because
    it decides the last bits of an image's result. On accelerators float32 keeps its format.

    A network that cannot be traced as a whole is traced child by child. A copy has to give the logits of `network` for
    many images and for one.
    """
    folds = any(isinstance(layer, _BatchNorm) for layer in network.modules())
    channels_last = x_BCHW.device.type == "cpu" and any(isinstance(layer, nn.Conv2d) for layer in network.modules())
    for fold in (True, False) if folds else (False,):
        if not (fold or channels_last):
            continue
        try:
            made = frozen_copy(network)
            made = _fold(made).requires_grad_(False) if fold else made
            made = made.to(memory_format=torch.channels_last) if channels_last else made
            if all(agrees(made, network, x, _FOLD_TOLERANCE) for x in (x_BCHW, x_BCHW[:1])):
                return made
            _logger.info("a copy of %s has other logits, fold=%s", type(network).__name__, fold)
        except Exception as error:  # tracing runs foreign code: whatever it raises, the original is as good
            _logger.info("%s cannot be copied, fold=%s: %s", type(network).__name__, fold, error)
    return network


def _fold(module: nn.Module) -> nn.Module:
    """The module folded as a whole or, where it cannot be traced, child by child."""
    try:
        return fuse(module)
    except Exception:
        for name, child in module.named_children():
            if next(child.children(), None) is not None:  # traced alone, a layer would lose its class
                setattr(module, name, _fold(child))
        return module


@tf32_allowed(False)
@torch.no_grad()
def agrees(network: nn.Module, original: nn.Module, x_BCHW: Tensor, tolerance: float) -> bool:
    """Whether both give the same logits up to `tolerance` times the largest logit, float32 products in full.

    TF32 alone, which torch allows convolutions by default, moves logits by more than folding may.
    """
    found, expected = network(x_BCHW).float(), original(x_BCHW).float()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@tf32_allowed(False)
def points_alike(network: nn.Module, original: nn.Module, x_BCHW: Tensor) -> bool:
    """Whether gradients of both point the same way, by the median of the images.

    Of the gap between the two likeliest classes, which does not vanish where the cross-entropy does. Images where the
    original has no gradient say nothing.
    """
    with torch.no_grad():
        classes_B2 = original(x_BCHW).topk(2, dim=1).indices
    found_BN, expected_BN = (_gap_gradient(each, x_BCHW, classes_B2) for each in (network, original))
    cosines_B = F.cosine_similarity(found_BN, expected_BN)[expected_BN.norm(dim=1) > 0]
    return not len(cosines_B) or bool(cosines_B.median() >= _SAME_WAY)


def input_gradient(values: Tensor, x_BCHW: Tensor) -> Tensor:
    """The gradient of the sum of `values`; zero where they do not depend on the images in autograd's eyes."""
    if not values.requires_grad:
        return torch.zeros_like(x_BCHW)
    (grad_BCHW,) = torch.autograd.grad(values.sum(), x_BCHW, allow_unused=True)
    return torch.zeros_like(x_BCHW) if grad_BCHW is None else grad_BCHW


@torch.enable_grad()
def _gap_gradient(network: nn.Module, x_BCHW: Tensor, classes_B2: Tensor) -> Tensor:
    """(B, N) float64, of the first class's logit less the second's; each image's largest entry is 1."""
    x_BCHW = x_BCHW.detach().clone().requires_grad_()
    first_B, second_B = network(x_BCHW).float().gather(1, classes_B2).unbind(1)
    grad_BCHW = input_gradient(first_B - second_B, x_BCHW)
    grad_BN = grad_BCHW.flatten(1).double()
    return grad_BN / grad_BN.abs().amax(dim=1, keepdim=True).clamp(min=_TINY)


def compiled(network: nn.Module, device: torch.device) -> Any:
    """The network through torch.compile, for the one batch shape of the run; as CUDA graphs on a GPU."""
    mode = "reduce-overhead" if device.type == "cuda" else None
    return torch.compile(network, dynamic=False, mode=mode)

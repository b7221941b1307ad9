"""Frozen copies of a network for gradients with respect to images.

Shapes: B images of C x H x W, K classes.
"""

import copy
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.modules.batchnorm import _BatchNorm

from .tf32 import tf32_allowed

_FOLD_TOLERANCE = 1e-4  # share of the largest logit
_SAME_WAY = 0.5  # cosine between two gradients; at least 0.976 in bfloat16 for six trained networks
_TINY = 1e-300
_HEAVY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # autocast runs these in bfloat16

_logger = logging.getLogger(__name__)


class Bfloat16Copy(nn.Module):
    """Takes float32 images and returns float32 logits, but computes products in bfloat16 and channels-last format.

    Weights of convolutions and linear layers are stored in bfloat16, so that they are rounded only once. Normalization
    and the first layer stay in float32, because a perturbation of eps is only a few rounding steps of bfloat16.
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
    """Runs a layer in float32 and casts its output to bfloat16, so that residual sums are in bfloat16 too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = self.layer(x.float())
        return out.to(torch.bfloat16)


@torch.no_grad()
def _first_heavy(network: nn.Module, x_BCHW: Tensor) -> str:
    """Return the name of the convolution or linear layer that runs first; "" if it is the network, or for none."""
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
    """Return whether the network has convolutions or linear layers, which a copy makes faster."""
    return any(isinstance(layer, _HEAVY) for layer in network.modules())


def frozen_copy(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose weights have no gradients."""
    return copy.deepcopy(network).eval().requires_grad_(False)


def folded(network: nn.Module, x_BCHW: Tensor, *, channels_last: bool = True) -> nn.Module:
    """Return a frozen float32 copy whose passes are faster, or `network` itself if no copy works.

    Batch normalization is folded into the convolutions. The channels-last format makes convolutions up to 40% faster on
    a CPU, and in TF32 on a GPU. It affects the last bits of results, so timing does not choose it. The logits of a copy
    have to agree with those of `network`, both for many images and for one.
    """
    layers = list(network.modules())
    folds = any(isinstance(layer, _BatchNorm) for layer in layers)
    channels_last &= any(isinstance(layer, nn.Conv2d) for layer in layers)
    for fold in [True] * folds + [False] * channels_last:
        try:
            made = _fold(frozen_copy(network)).requires_grad_(False) if fold else frozen_copy(network)
            if channels_last:
                made = made.to(memory_format=torch.channels_last)
            if all(agrees(made, network, x, _FOLD_TOLERANCE) for x in (x_BCHW, x_BCHW[:1])):
                return made
            _logger.info("a copy of %s has other logits, fold=%s", type(network).__name__, fold)
        except Exception as error:  # tracing runs foreign code
            _logger.info("%s cannot be copied, fold=%s: %s", type(network).__name__, fold, error)
    return network


def _fold(module: nn.Module) -> nn.Module:
    """Fold the batch normalization of the module or, if torch cannot trace the module, that of each child."""
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
    """Return whether the logits of both differ by at most `tolerance` times the largest logit, without TF32."""
    found, expected = network(x_BCHW).float(), original(x_BCHW).float()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@tf32_allowed(False)
@torch.enable_grad()
def points_alike(network: nn.Module, original: nn.Module, x_BCHW: Tensor) -> bool:
    """Return whether the gradients of both have a similar direction: their median cosine is at least `_SAME_WAY`.

    These are gradients of the difference between the two largest logits, which do not vanish as those of a
    cross-entropy may. Images without a gradient do not count.
    """
    x_BCHW = x_BCHW.detach().clone().requires_grad_()
    classes_B2 = original(x_BCHW).topk(2, dim=1).indices
    grads_BN: list[Tensor] = []
    for each in (network, original):
        first_B, second_B = each(x_BCHW).float().gather(1, classes_B2).unbind(1)
        grad_BN = input_gradient(first_B - second_B, x_BCHW).flatten(1).double()
        grads_BN.append(grad_BN / grad_BN.abs().amax(dim=1, keepdim=True).clamp(min=_TINY))  # no square underflows
    found_BN, expected_BN = grads_BN
    cosines_B = F.cosine_similarity(found_BN, expected_BN)[expected_BN.any(dim=1)]
    return not len(cosines_B) or bool(cosines_B.median() >= _SAME_WAY)


def input_gradient(values: Tensor, x_BCHW: Tensor) -> Tensor:
    """Return the gradient of the sum of `values`; zero if `values` have no graph that leads to the images."""
    if not values.requires_grad:
        return torch.zeros_like(x_BCHW)
    (grad_BCHW,) = torch.autograd.grad(values.sum(), x_BCHW, allow_unused=True)
    return torch.zeros_like(x_BCHW) if grad_BCHW is None else grad_BCHW

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

_FOLD_TOLERANCE = 1e-4  # of the largest logit
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
        self.network = network
        first = _first_heavy(network, x_BCHW[:1])
        for name, layer in list(network.named_modules()):
            if isinstance(layer, _HEAVY) and name != first:
                layer.to(torch.bfloat16)
        if first:
            parent, _, own = first.rpartition(".")
            setattr(network.get_submodule(parent), own, _RoundedAfter(network.get_submodule(first)))
        network.to(memory_format=torch.channels_last)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        with torch.autocast(x_BCHW.device.type, torch.bfloat16):
            logits_BK: Tensor = self.network(x_BCHW.contiguous(memory_format=torch.channels_last))
        return logits_BK.float()


class _RoundedAfter(nn.Module):
    """A layer in float32, its output in bfloat16: left in float32 it would keep the residual sums after it there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer
        self.register_buffer("phases", phases_of(layer))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            if self.phases is not None and x.device.type == "cpu":
                out: Tensor = _StridedConv.apply(
                    x.float(), self.layer.weight, self.layer.bias, self.phases, self.layer.stride[0],
                    self.layer.padding[0],
                )  # fmt: skip
            else:
                out = self.layer(x.float())
        return out.to(torch.bfloat16)


class _StridedConv(torch.autograd.Function):
    """A convolution with a stride, whose input gradient is a convolution without one.

    For the layer that sees the images: with 3 channels, oneDNN's strided gradient takes twice the time, and as long as
    a tenth of a small network's pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, phases: Tensor, stride: int, padding: int
    ) -> Tensor:
        ctx.save_for_backward(phases)
        ctx.stride, ctx.shape = stride, x.shape
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (phases,) = ctx.saved_tensors
        (B, C, H, W), s, (h, w) = ctx.shape, ctx.stride, grad.shape[2:]
        # Each output pixel stands for s x s pixels of the input; the last of those may have no output of their own.
        rows, columns = max(-(-H // s), h), max(-(-W // s), w)
        found = F.conv2d(F.pad(grad, (0, columns - w, 0, rows - h)), phases, padding=phases.shape[-1] // 2)
        shuffled = found.view(B, C, s, s, rows, columns).permute(0, 1, 4, 2, 5, 3).reshape(B, C, rows * s, columns * s)
        return shuffled[..., :H, :W], None, None, None, None, None


def phases_of(layer: nn.Module) -> Tensor | None:
    """The filters that turn the gradient of a strided convolution's output into that of its input.

    With stride s, pixel s i + r of the input is seen by output i + d through weight a = r + p - s d. So the gradient of
    the pixels of one phase r is a convolution of the output's gradient, with weight a at offset d; for rows and columns
    there are s^2 phases, and the result is (C s^2, O, side, side), the offset 0 in the middle. None for a convolution
    without stride, and for a rare kind.
    """
    # A subclass or a hook may compute other weights (weight standardisation, weight normalisation).
    if type(layer) is not nn.Conv2d or layer._forward_pre_hooks:
        return None
    k, s, p = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    square = (layer.kernel_size, layer.stride, layer.padding) == ((k, k), (s, s), (p, p))
    if s == 1 or not plain or not square or isinstance(p, str):  # "same"
        return None
    taps = [(r, a, (r + p - a) // s) for r in range(s) for a in range(k) if (r + p - a) % s == 0]
    reach = max(abs(d) for _, _, d in taps)
    n_out, n_in = layer.weight.shape[:2]
    phases = layer.weight.new_zeros(n_in, s, s, n_out, 2 * reach + 1, 2 * reach + 1)
    for r, a, d in taps:
        for r_2, a_2, d_2 in taps:
            phases[:, r, r_2, :, reach + d, reach + d_2] = layer.weight.detach()[:, :, a, a_2].t()
    return phases.flatten(0, 2).contiguous(memory_format=torch.channels_last)


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
    """A frozen copy with batch normalisation folded into the convolutions; `network` itself where that cannot be done.

    On a CPU its weights lie in channels-last, and so does what passes through it: a ResNet-18's passes take a tenth
    less time in float32. Not measured on accelerators, where float32 keeps its layout.

    What cannot be traced as a whole is traced child by child, and the copy has to give the original's logits.
    """
    if not any(isinstance(layer, _BatchNorm) for layer in network.modules()):
        return network
    try:
        changed = _fold(frozen_copy(network)).requires_grad_(False)
        if x_BCHW.device.type == "cpu":
            changed = changed.to(memory_format=torch.channels_last)
        if all(agrees(changed, network, x, _FOLD_TOLERANCE) for x in (x_BCHW, x_BCHW[:1])):
            return changed
        _logger.info("batch normalisation of %s is not folded: other logits", type(network).__name__)
    except Exception as error:  # tracing runs foreign code: whatever it raises, the original is as good
        _logger.info("batch normalisation of %s is not folded: %s", type(network).__name__, error)
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


@torch.no_grad()
def agrees(network: nn.Module, original: nn.Module, x_BCHW: Tensor, tolerance: float) -> bool:
    """Whether both give the same logits up to `tolerance` times the largest logit."""
    found, expected = network(x_BCHW).float(), original(x_BCHW).float()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def compiled(network: nn.Module, device: torch.device) -> Any:
    """The network through torch.compile, for the one batch shape of the run; as CUDA graphs on a GPU."""
    mode = "reduce-overhead" if device.type == "cuda" else None
    return torch.compile(network, dynamic=False, mode=mode)

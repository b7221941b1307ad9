"""Convolutions of a frozen copy on a CPU: ReLU and residual sum in the product, the input's gradient as a product.

`fused` replaces a network's convolutions by `Convolution`s. One computes what follows it in the same call, through
oneDNN's operations with post-ops and with weights that are laid out once; and the gradient with respect to its input is
again a convolution, without a stride and with weights that are laid out once. Both give autograd's results up to
rounding. Weights are constants: there is no gradient for them.

Shapes: B images of C x H x W in, O channels of h x w out; kernel k, stride s, padding p.
"""

import functools
import itertools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.grad import conv2d_input

from . import winograd

# Up to so many input channels the gradient of a strided convolution of several pixels is one without a stride: with 16
# channels oneDNN's own takes twice the time of it, with 64 it is faster.
_FEW_CHANNELS = 32


class Convolution(nn.Module):
    """What `layer` computes, and after it what a network often has there: `relu(layer(x) + other)`.

    Args:
        layer: a plain convolution (`is_plain`). Its weights' dtype is that of the product.
        rounded: the dtype of the output, and of the gradient's product.
    """

    weight: Tensor
    rounded: torch.dtype

    def __init__(self, layer: nn.Conv2d, rounded: torch.dtype) -> None:
        super().__init__()
        self.rounded = rounded
        self.kernel, self.stride, self.padding = layer.kernel_size[0], layer.stride[0], int(layer.padding[0])
        self.register_buffer("weight", layer.weight.detach().contiguous(memory_format=torch.channels_last))
        bias = None if layer.bias is None else layer.bias.detach()
        self._forward = _Product(self.weight, bias, self.stride)
        taps = _taps(layer)
        self._before = -min(offset for _, _, offset in taps)
        self._seen = sorted({r for r, _, _ in taps})  # phases of the input's pixels that any output sees
        phases = phases_of(layer, taps, self._seen)
        self._backward = None if phases is None else _Product(phases.to(rounded), None, 1)

    def forward(self, x: Tensor, other: Tensor | None = None, relu: bool = False, spare: bool = False) -> Tensor:
        """Images (B, C, H, W) -> (B, O, h, w); `spare`: nobody reads `other` after this, and it may be overwritten."""
        if torch.compiler.is_compiling():
            return self._forward.in_steps(x.to(self.weight.dtype), self.padding, other, relu).to(self.rounded)
        if other is not None and not self._adds(x, other):
            total: Tensor = self(x) + other
            return total.relu() if relu else total
        if torch.is_grad_enabled() and (x.requires_grad or (other is not None and other.requires_grad)):
            out: Tensor = _WithGradient.apply(x, other, self, relu)
            return out
        return self.computed(x, other, relu, spare)

    def _adds(self, x: Tensor, other: Tensor) -> bool:
        """Whether `other` is like the output, and not broadcast or of another dtype."""
        sides = [(side + 2 * self.padding - self.kernel) // self.stride + 1 for side in x.shape[2:]]
        return self.weight.dtype == self.rounded == other.dtype and other.shape == (len(x), len(self.weight), *sides)

    def computed(self, x: Tensor, other: Tensor | None, relu: bool, spare: bool = False) -> Tensor:
        """The same without a graph, in channels-last."""
        x = x.to(self.weight.dtype).contiguous(memory_format=torch.channels_last)
        return self._forward(x, self.padding, other, relu, spare).to(self.rounded)

    def input_gradient(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient, channels-last, with respect to an input of that shape, layout and dtype."""
        (C, H, W), s, (h, w) = like.shape[1:], self.stride, grad.shape[2:]
        if self._backward is None:
            found: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
                list(like.shape), self.weight, grad.to(self.weight.dtype), s, self.padding
            )
            return found.to(like.dtype)
        # Pixels of the input in squares of s x s; the padding is negative where the output has more pixels than these.
        rows, columns = -(-H // s), -(-W // s)
        before, reach = self._before, self._backward.weight.shape[-1] - 1
        below, right = rows - h + reach - before, columns - w + reach - before
        if before == below == right >= 0:
            found = self._backward(grad, before)
        else:
            found = self._backward(F.pad(grad, (before, right, before, below)), 0)
        as_input = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if s == 1:
            return found if (found.dtype, found.stride()) == (like.dtype, like.stride()) else as_input.copy_(found)
        if like.stride(1) == 1 and (len(self._seen) * rows, len(self._seen) * columns) == (H, W):
            # The pixels' channels lie together, so that one copy of all phases takes half the time of one for each.
            parts = found.view(-1, s, s, C, rows, columns).permute(0, 3, 4, 1, 5, 2)
            as_input.view(-1, C, rows, s, columns, s).copy_(parts)
            return as_input
        if len(self._seen) < s:
            as_input.zero_()
        for part, (r, r_2) in zip(torch.split(found, C, dim=1), itertools.product(self._seen, repeat=2), strict=True):
            to = as_input[:, :, r::s, r_2::s]
            to.copy_(part[:, :, : to.shape[2], : to.shape[3]])
        return as_input


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, layer: Convolution, relu: bool) -> Tensor:
        out = layer.computed(x, other, relu)
        ctx.save_for_backward(*([out] if relu else []))
        ctx.layer, ctx.like = layer, torch.empty_like(x, device="meta")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = grad.contiguous(memory_format=torch.channels_last)  # like `out`: all that follows is faster
        for out in ctx.saved_tensors:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x = ctx.layer.input_gradient(grad, ctx.like) if ctx.needs_input_grad[0] else None
        return grad_x, grad if ctx.needs_input_grad[1] else None, None, None


class _Product:
    """A convolution with fixed weights, which are laid out for oneDNN when a shape is new."""

    def __init__(self, weight: Tensor, bias: Tensor | None, stride: int) -> None:
        self.weight, self.bias, self.stride = weight, bias, stride
        self._laid_out: tuple[Any, Tensor] | None = None

    def __call__(
        self, x: Tensor, padding: int, other: Tensor | None = None, relu: bool = False, spare: bool = False
    ) -> Tensor:
        if not has_post_ops(x.dtype):
            return self.in_steps(x, padding, other, relu)
        if winograd.pays(self.weight, x, self.stride, padding):
            return self._winograd(x, other, relu)
        return self.with_post_ops(x, padding, other, relu, spare)

    @functools.cached_property
    def _winograd(self) -> winograd.Winograd:
        return winograd.Winograd(self.weight, self.bias)

    def in_steps(self, x: Tensor, padding: int, other: Tensor | None, relu: bool) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out = F.conv2d(x, self.weight, self.bias, self.stride, padding)
        out = out if other is None else out + other
        return out.relu() if relu else out

    def with_post_ops(self, x: Tensor, padding: int, other: Tensor | None, relu: bool, spare: bool = False) -> Tensor:
        where = [padding, padding], [self.stride, self.stride], [1, 1], 1
        if self._laid_out is None or self._laid_out[0] != x.shape:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            self._laid_out = x.shape, reorder(self.weight, *where, list(x.shape))
        given, after = (self._laid_out[1], self.bias, *where), "relu" if relu else "none"
        if other is None:
            out: Tensor = torch.ops.mkldnn._convolution_pointwise(x, *given, after, [], "")
            return out
        # Summing into a copy of `other` takes less time than the operation that reads it and writes anew.
        in_place = spare and other.is_contiguous(memory_format=torch.channels_last)
        out = other if in_place else other.clone(memory_format=torch.channels_last)
        torch.ops.mkldnn._convolution_pointwise_.binary(out, x, *given, "add", 1.0, "relu" if relu else None, [], "")
        return out


@functools.cache
def has_post_ops(dtype: torch.dtype) -> bool:
    """Whether oneDNN's convolutions with post-ops, which torch does not document, work here in this dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 36 * 4, dtype=dtype).view(4, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    x = torch.linspace(-1, 1, 4 * 64, dtype=dtype).view(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    product = _Product(weight, None, 1)
    try:
        pairs = [(product.with_post_ops(x, 1, other, True), product.in_steps(x, 1, other, True)) for other in (None, x)]
    except (AttributeError, RuntimeError, TypeError):  # not in this torch, or not on this CPU
        return False
    return all(torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05) for found, expected in pairs)


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a square convolution of torch's own, without groups, dilation or another padding than zeros."""
    # A subclass or a hook may compute other weights (weight standardisation, weight normalisation).
    if type(layer) is not nn.Conv2d or layer._forward_pre_hooks or layer._forward_hooks:
        return False
    if isinstance(layer.padding, str) or layer.groups != 1 or layer.padding_mode != "zeros":
        return False
    square = all(len(set(sizes)) == 1 for sizes in (layer.kernel_size, layer.stride, layer.padding))
    return square and layer.dilation == (1, 1)


def _taps(layer: nn.Conv2d) -> list[tuple[int, int, int]]:
    """(r, a, d): pixel s i + r of the input is seen by output i + d through weight a, along rows or columns."""
    k, s, p = layer.kernel_size[0], layer.stride[0], int(layer.padding[0])
    return [(r, a, (r + p - a) // s) for r in range(s) for a in range(k) if (r + p - a) % s == 0]


def phases_of(layer: nn.Conv2d, taps: list[tuple[int, int, int]], seen: list[int]) -> Tensor | None:
    """The filters that turn the gradient of a convolution's output into that of its input.

    With stride s, pixel s i + r of the input is seen by output i + d through weight a = r + p - s d. So the gradient of
    the pixels of one phase r is a convolution of the output's gradient, with weight a at offset d; for rows and columns
    there are s^2 phases, fewer where a filter smaller than the stride skips pixels, and the result is (phases * C, O,
    side, side), beginning with the smallest offset. Without a stride it is the flipped filter. None for a stride with
    many channels and more than one pixel, where oneDNN's own gradient is faster.
    """
    O, C, k, _ = layer.weight.shape  # noqa: E741
    if k > 1 and layer.stride[0] > 1 and C > _FEW_CHANNELS:
        return None
    least, most = min(d for _, _, d in taps), max(d for _, _, d in taps)
    phases = layer.weight.new_zeros(len(seen), len(seen), C, O, most - least + 1, most - least + 1)
    for (r, a, d), (r_2, a_2, d_2) in itertools.product(taps, repeat=2):
        weight = layer.weight.detach()[:, :, a, a_2].t()
        phases[seen.index(r), seen.index(r_2), :, :, d - least, d_2 - least] = weight
    return phases.flatten(0, 2).contiguous(memory_format=torch.channels_last)


def fused(network: nn.Module, rounded: torch.dtype) -> nn.Module:
    """The network with its plain convolutions replaced, and what follows them taken in where it can be traced."""
    for name, layer in list(network.named_modules()):
        if name and is_plain(layer):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, Convolution(layer, rounded))
    return _with_post_ops(network) if any(isinstance(layer, Convolution) for layer in network.modules()) else network


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Convolution) or super().is_leaf_module(m, module_qualified_name)


def _with_post_ops(module: nn.Module) -> nn.Module:
    """Traced as a whole or, where that cannot be, child by child."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs foreign code
        for name, child in module.named_children():
            if next(child.children(), None) is not None:  # traced alone, a layer would lose its class
                setattr(module, name, _with_post_ops(child))
        return module

    def convolutions() -> list[fx.Node]:
        modules = (node for node in graph.nodes if node.op == "call_module")
        return [node for node in modules if isinstance(module.get_submodule(str(node.target)), Convolution)]

    for node in convolutions():
        _take_in(node, module)
    _mark_spare(convolutions())
    graph.lint()
    return fx.GraphModule(module, graph)


def _take_in(node: fx.Node, root: nn.Module) -> None:
    """Into the convolution `node` the sum that alone uses its output, and the ReLU that alone uses that."""
    last, other = node, None
    total = _only_user(node)
    if total is not None and _is(total, root, _SUMS) and len(total.args) == 2 and not total.kwargs:
        others = [each for each in total.args if each is not node]
        in_place = total.target in _IN_PLACE and total.args[0] is not node  # changes what others may see
        if len(others) == 1 and isinstance(others[0], fx.Node) and not in_place:
            last, other = total, others[0]
    rectified = _only_user(last)
    relu = rectified is not None and _is(rectified, root, _RELUS)
    if rectified is not None and relu:
        last = rectified
    if last is node:
        return
    with node.graph.inserting_before(last):
        new = node.graph.call_module(str(node.target), (node.args[0], other), {"relu": relu})
    last.replace_all_uses_with(new)
    for done in (last, total, node):
        if done is not None and not done.users and done in done.graph.nodes:
            done.graph.erase_node(done)


def _mark_spare(convolutions: list[fx.Node]) -> None:
    """Tell the last reader of a convolution's output, if that adds it, that it may be overwritten.

    Only where convolutions alone read it: what others make of it may be a view.
    """
    place = {node: i for i, node in enumerate(convolutions)}
    for node in convolutions:
        x, other = (*node.args, None)[:2]
        if not isinstance(other, fx.Node) or other not in place or other is x:
            continue
        if all(place.get(reader, math.inf) <= place[node] for reader in other.users):
            node.update_kwarg("spare", True)


_IN_PLACE = (operator.iadd, "add_")  # tracing takes `a += b` for `a + b`
_SUMS = (operator.add, torch.add, "add", *_IN_PLACE)
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", nn.ReLU)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: fx.Node, root: nn.Module, what: tuple[Any, ...]) -> bool:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in what
    return node.target in what

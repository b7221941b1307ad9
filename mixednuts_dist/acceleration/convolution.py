"""Convolutions of a frozen copy on a CPU: ReLU and residual sum in the product, the input's gradient as a product.

A `Convolution` computes what follows it in the same call, through oneDNN's operations with post-ops and with weights
that are laid out once; and the gradient with respect to its input is again a convolution, without a stride and with
weights that are laid out once. `chained` runs several of them as one function of autograd, which owns what is between
them. All give autograd's results up to rounding. Weights are constants: there is no gradient for them.

Shapes: B images of C x H x W in, O channels of h x w out; kernel k, stride s, padding p.
"""

import functools
import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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

    def forward(self, x: Tensor, other: Tensor | None = None, relu: bool = False) -> Tensor:
        """Images (B, C, H, W) -> (B, O, h, w)."""
        inputs = [x] if other is None else [x, other]
        (out,) = chained([Step(self, 0, None if other is None else 1, relu)], [len(inputs)], inputs)
        return out

    def computed(self, x: Tensor, other: Tensor | None, relu: bool, spare: bool = False) -> Tensor:
        """The same without a graph, in channels-last; `spare`: `other` may be overwritten."""
        x = x.to(self.weight.dtype).contiguous(memory_format=torch.channels_last)
        if other is None or (self.weight.dtype == other.dtype == self.rounded and other.shape == self.shape(x.shape)):
            return self._forward(x, self.padding, other, relu, spare).to(self.rounded)
        total = self._forward(x, self.padding).to(self.rounded) + other  # broadcast, or of another dtype
        return total.relu() if relu else total

    def shape(self, of_input: Sequence[int]) -> tuple[int, ...]:
        """The shape of the product, without what is added to it."""
        sides = [(side + 2 * self.padding - self.kernel) // self.stride + 1 for side in of_input[2:]]
        return (of_input[0], len(self.weight), *sides)

    def input_gradient(self, grad: Tensor, like: "Like", onto: Tensor | None = None) -> Tensor:
        """The gradient with respect to an input of that shape, layout and dtype; added to `onto`, which is overwritten.

        `grad` is in channels-last.
        """
        (H, W), s, (h, w) = like.shape[2:], self.stride, grad.shape[2:]
        if self._backward is None:
            found: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
                list(like.shape), self.weight, grad.to(self.weight.dtype), s, self.padding
            )
            return found.to(like.dtype) if onto is None else onto.add_(found)
        # Pixels of the input in squares of s x s; the padding is negative where the output has more pixels than these.
        rows, columns = -(-H // s), -(-W // s)
        before, reach = self._before, self._backward.weight.shape[-1] - 1
        below, right = rows - h + reach - before, columns - w + reach - before
        if before == below == right >= 0:
            if s == 1 and onto is not None and (onto.dtype, onto.stride()) == (grad.dtype, like.stride):
                return self._backward(grad, before, onto, spare=True)
            found = self._backward(grad, before)
        else:
            found = self._backward(F.pad(grad, (before, right, before, below)), 0)
        as_input = self._as_input(found, like)
        return as_input if onto is None else onto.add_(as_input)

    def _as_input(self, found: Tensor, like: "Like") -> Tensor:
        """(B, phases * C, rows, columns), see `phases_of` -> (B, C, H, W)."""
        (C, H, W), s, (rows, columns) = like.shape[1:], self.stride, found.shape[2:]
        if s == 1 and (found.dtype, found.stride()) == (like.dtype, like.stride):
            return found
        as_input = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
        if s == 1:
            return as_input.copy_(found)
        if like.stride[1] == 1 and (len(self._seen) * rows, len(self._seen) * columns) == (H, W):
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


class Like(NamedTuple):
    """What a gradient has in common with its tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> "Like":
        return cls(tuple(values.shape), values.stride(), values.dtype)


@dataclass(frozen=True)
class Step:
    """`relu(layer(values[x]) + values[other])`, the next of a chain's values."""

    layer: Convolution
    x: int
    other: int | None = None
    relu: bool = False
    dropped: tuple[int, ...] = ()  # what steps have computed and nobody reads after this one

    @property
    def spare(self) -> bool:
        """Whether `other` may be overwritten."""
        return self.other in self.dropped and self.other != self.x

    def computed(self, values: Mapping[int, Tensor], kept: Container[int] = ()) -> Tensor:
        """The value, written over `other` where that may be and is not to be kept."""
        other = None if self.other is None else values[self.other]
        return self.layer.computed(values[self.x], other, self.relu, self.spare and self.other not in kept)


def chained(steps: Sequence[Step], outputs: Sequence[int], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of the values, those of the inputs and then one a step, the ones of these indices."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and any(x.requires_grad for x in inputs):
        found: tuple[Tensor, ...] = _WithGradient.apply(steps, outputs, *inputs)
        return found
    values = dict(enumerate(inputs))
    for i, step in enumerate(steps, start=len(inputs)):
        values[i] = step.computed(values)
        for done in step.dropped:
            del values[done]
    return [values[i] for i in outputs]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Sequence[Step], outputs: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        values, likes = dict(enumerate(inputs)), [Like.of(x) for x in inputs]
        rectified: dict[int, Tensor] = {}  # of these the gradient is zero where they are
        for i, step in enumerate(steps, start=len(inputs)):
            values[i] = step.computed(values, kept=rectified)
            likes.append(Like.of(values[i]))
            if step.relu:
                rectified[i] = values[i]
            for done in step.dropped:
                del values[done]
        ctx.save_for_backward(*rectified.values())
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.outputs, ctx.likes = steps, outputs, likes
        return tuple(values[i] for i in outputs)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        n_inputs = len(ctx.likes) - len(ctx.steps)
        needed = [*ctx.needs_input_grad[2:], *[True] * len(ctx.steps)]
        grads, rectified = _Gradients(ctx.likes), list(ctx.saved_tensors)
        for i, values in zip(ctx.outputs, given, strict=True):
            if values is not None:
                grads.add(i, values.contiguous(memory_format=torch.channels_last), mine=False)
        for i in reversed(range(n_inputs, len(ctx.likes))):
            step = ctx.steps[i - n_inputs]
            out = rectified.pop() if step.relu else None
            grad, mine = grads.taken(i)
            if grad is None:
                continue
            if out is not None:
                threshold = torch.ops.aten.threshold_backward
                grad = threshold.grad_input(grad, out, 0, grad_input=grad) if mine else threshold(grad, out, 0)
                mine = True
            if needed[step.x]:
                grads.add_product(step.x, step.layer, grad)
            if step.other is not None and needed[step.other]:
                grads.add(step.other, grad, mine)
        return None, None, *(grads.taken(i)[0] for i in range(n_inputs))


class _Gradients:
    """The gradients of a chain's values, added up in place where nobody else holds them."""

    def __init__(self, likes: Sequence[Like]) -> None:
        self._likes = likes
        self._values: list[Tensor | None] = [None] * len(likes)
        self._mine = [False] * len(likes)

    def taken(self, i: int) -> tuple[Tensor | None, bool]:
        """The gradient, which is forgotten here, and whether nobody else holds it."""
        values, self._values[i] = self._values[i], None
        return values, self._mine[i]

    def add(self, i: int, grad: Tensor, mine: bool) -> None:
        """Of a summand, which may have been broadcast."""
        like, before = self._likes[i], self._values[i]
        if (grad.shape, grad.dtype) != (like.shape, like.dtype):
            grad, mine = grad.sum_to_size(like.shape).to(like.dtype), True
        if before is None:
            self._values[i], self._mine[i] = grad, mine
        else:
            self._values[i], self._mine[i] = before.add_(grad) if self._mine[i] else before + grad, True

    def add_product(self, i: int, layer: Convolution, grad: Tensor) -> None:
        """Of a convolution's input."""
        like, before = self._likes[i], self._values[i]
        shape = layer.shape(like.shape)
        if (grad.shape, grad.dtype) != (shape, layer.rounded):
            grad = grad.sum_to_size(shape).to(layer.rounded).contiguous(memory_format=torch.channels_last)
        if before is not None and not self._mine[i]:
            before = before.clone()
        self._values[i], self._mine[i] = layer.input_gradient(grad, like, onto=before), True


class _Product:
    """A convolution with fixed weights, which are laid out for oneDNN when a shape is new."""

    def __init__(self, weight: Tensor, bias: Tensor | None, stride: int) -> None:
        self.weight, self.bias, self.stride = weight, bias, stride
        self._laid_out: tuple[Any, Tensor] | None = None

    def __call__(
        self, x: Tensor, padding: int, other: Tensor | None = None, relu: bool = False, spare: bool = False
    ) -> Tensor:
        if torch.compiler.is_compiling() or not has_post_ops(x.dtype):
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

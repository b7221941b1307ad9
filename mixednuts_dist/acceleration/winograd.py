"""3 x 3 convolutions of many channels on small images, by Winograd's F(2 x 2, 3 x 3) (Lavin & Gray 2016, section 4.1).

Each square of 2 x 2 outputs is made of 16 products a channel instead of 36. What is saved pays for the transformations
before and after it where there are many channels and few pixels: beside oneDNN's own convolution in bfloat16, which
computes the products with the border's zeros too, it takes half to five sixths of the time at 512 channels and 4 x 4
pixels, and four fifths to all of it at 256 and 8 x 8, as CPUs' bfloat16 units differ. It rounds more, so that its error
is about three times that of a convolution in bfloat16: for gradients only.

Shapes: B images of C x H x W in, O channels out; t x u squares of 2 x 2 pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_MANY, _FEW = 256, 64  # channels in and out, at least; pixels, at most

_FILTERS = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]])  # G
_AFTER = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, -1.0, -1.0]])  # A^T


def pays(weight: Tensor, x_BCHW: Tensor, stride: int, padding: int) -> bool:
    """Whether the convolution can be computed so, and is faster for it."""
    H, W = x_BCHW.shape[2:]
    fits = weight.shape[2:] == (3, 3) and stride == padding == 1 and H % 2 == W % 2 == 0
    return fits and weight.dtype == torch.bfloat16 and min(weight.shape[:2]) >= _MANY and H * W <= _FEW


class Winograd:
    """A convolution with stride and padding 1 whose filters (O, C, 3, 3) are fixed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        filters = torch.einsum("ia,jb,ocab->jico", _FILTERS, _FILTERS, weight.float())
        self._filters = filters.flatten(0, 1).to(weight.dtype)
        self._after = torch.kron(_AFTER, _AFTER).to(weight.dtype)
        self._bias = bias

    def __call__(self, x_BCHW: Tensor, other: Tensor | None = None, relu: bool = False) -> Tensor:
        """`relu(conv(x) + other)`, channels-last."""
        B, C, H, W = x_BCHW.shape
        t, u = H // 2, W // 2
        padded = F.pad(x_BCHW.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        rows = _before(padded, 1, padded.new_empty(4, B, t, W + 2, C))
        squares = _before(rows, 3, padded.new_empty(4, 4, B, t, u, C))
        products = torch.bmm(squares.view(16, B * t * u, C), self._filters)
        if self._bias is not None:
            products[5] += self._bias  # it is in each of the four outputs once
        # As a product, since that adds up in float32 and reads everything once.
        four = torch.mm(self._after, products.view(16, -1)).view(2, 2, B, t, u, -1)
        out = four.permute(2, 3, 1, 4, 0, 5).contiguous().view(B, H, W, -1).permute(0, 3, 1, 2)
        out = out if other is None else out.add_(other)
        return out.relu_() if relu else out


def _before(pixels: Tensor, axis: int, to: Tensor) -> Tensor:
    """B^T d along an axis, of windows of four pixels that overlap by two: windows there, and the four in front."""
    pairs: Tensor = pixels.unflatten(axis, (-1, 2))  # type: ignore[no-untyped-call]
    n = pairs.shape[axis] - 1
    even, odd = pairs.unbind(axis + 1)
    first, third = even.narrow(axis, 0, n), even.narrow(axis, 1, n)
    second, fourth = odd.narrow(axis, 0, n), odd.narrow(axis, 1, n)
    torch.sub(first, third, out=to[0])
    torch.add(second, third, out=to[1])
    torch.sub(third, second, out=to[2])
    torch.sub(second, fourth, out=to[3])
    return to

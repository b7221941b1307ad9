"""3 x 3 convolutions of many channels by Winograd's F(4 x 4, 3 x 3) (Lavin & Gray 2016, section 4.3).

Each square of 4 x 4 outputs is made of 36 products a channel instead of 144. What is saved pays for the transformations
before and after it where there are many channels: beside oneDNN's own convolution in bfloat16 it takes three quarters
of the time at 128 channels, half to two thirds at 256 to 640. It rounds nine times as much, by 1.6 % of the output: for
gradients only.

The polynomials are taken at 0, +-3/4, +-3/2 and infinity. Of all such points in sixteenths these round least in
bfloat16; the usual ones, +-1 and +-2, round twice as much.

Shapes: B images of C x H x W in, O channels out; t x u squares of 4 x 4 pixels.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MANY = 128  # channels in and out, at least: with 64 the transformations take what the products save
# Images at once: as many as have so many values, in or out, and so many squares at least. What lies between two
# products then stays in a CPU's cache: at 160 channels and 32 x 32 pixels half the time of all 64 images at once.
_VALUES, _SQUARES = 1 << 19, 128
_POINTS = (0.0, 0.75, -0.75, 1.5, -1.5)


def _transforms() -> tuple[Tensor, Tensor, Tensor]:
    """(A^T, G, B^T), (4, 6), (6, 3) and (6, 6) in float64, so that A^T [(G g) * (B^T d)] is g's correlation with d."""
    after, filters, before = (torch.zeros(*shape, dtype=torch.float64) for shape in ((4, 6), (6, 3), (6, 6)))
    for i, point in enumerate(_POINTS):
        others = _POINTS[:i] + _POINTS[i + 1 :]
        after[:, i] = torch.tensor([point**power for power in range(4)])
        filters[i] = torch.tensor([point**power for power in range(3)]) / math.prod(point - other for other in others)
        before[i, :5] = _with_roots(others)
    after[3, 5] = filters[5, 2] = 1
    before[5] = _with_roots(_POINTS)
    return after, filters, before


def _with_roots(roots: tuple[float, ...]) -> Tensor:
    """The coefficients of the polynomial, the constant first."""
    found = torch.ones(1, dtype=torch.float64)
    for root in roots:
        found = F.pad(found, (1, 0)) - root * F.pad(found, (0, 1))
    return found


def pays(weight: Tensor, x_BCHW: Tensor, stride: int, padding: int) -> bool:
    """Whether the convolution can be computed so, and is faster for it."""
    H, W = x_BCHW.shape[2:]
    fits = weight.shape[2:] == (3, 3) and stride == padding == 1 and H % 4 == W % 4 == 0
    return fits and weight.dtype == torch.bfloat16 and min(weight.shape[:2]) >= _MANY and not has_matrix_unit()


@functools.cache
def has_matrix_unit() -> bool:
    """Whether bfloat16's products take an eighth of the time (AMX), less than the transformations by any account."""
    supported: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return supported()


class Winograd:
    """A convolution with stride and padding 1 whose filters (O, C, 3, 3) are fixed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        O, C, _, _ = weight.shape  # noqa: E741
        after, filters, before = (torch.kron(each, each) for each in _transforms())
        nine = weight.permute(2, 3, 1, 0).reshape(9, -1).float()
        self._filters = torch.mm(filters.float(), nine).to(weight).view(36, C, O)
        self._before, self._after = before.to(weight), after.to(weight)
        self._bias = bias

    def __call__(self, x_BCHW: Tensor, other: Tensor | None = None, relu: bool = False) -> Tensor:
        """`relu(conv(x) + other)`, channels-last."""
        B, _, H, W = x_BCHW.shape
        O = self._filters.shape[2]  # noqa: E741
        padded = F.pad(x_BCHW.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        pixels = padded.new_empty(B, H // 4, 4, W // 4, 4, O)
        at_once = max(1, _VALUES // (H * W * max(self._filters.shape[1:])), 16 * _SQUARES // (H * W))
        for part, to in zip(torch.split(padded, at_once), torch.split(pixels, at_once), strict=True):
            self._convolve(part, to)
        out = pixels.view(B, H, W, O).permute(0, 3, 1, 2)
        out = out if other is None else out.add_(other)
        return out.relu_() if relu else out

    def _convolve(self, padded: Tensor, to: Tensor) -> None:
        """(B, H + 2, W + 2, C) -> (B, t, 4, u, 4, O)."""
        windows = padded.unfold(1, 6, 4).unfold(2, 6, 4)
        B, t, u, C = windows.shape[:4]
        # The transformations as products, since these add up in float32 and read everything once.
        squares = torch.mm(self._before, windows.permute(4, 5, 0, 1, 2, 3).reshape(36, -1))
        products = torch.bmm(squares.view(36, B * t * u, C), self._filters)
        found = torch.mm(self._after, products.view(36, -1)).view(4, 4, B, t, u, -1).permute(2, 3, 0, 4, 1, 5)
        if self._bias is None:
            to.copy_(found)
        else:
            torch.add(found, self._bias, out=to)

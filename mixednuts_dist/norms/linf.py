"""Linf, the maximum norm: every pixel may move by the radius."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.register import NORMS
from .ball import MOMENTUM, Ball
from .random import uniform


@NORMS("Linf", order=1, usual="8/255 on CIFAR-10", largest=1.0, in_255ths=True)
class Linf(Ball):
    """Maximum norm: each pixel may change by eps.

    Example:
        >>> import torch
        >>> Linf(0.25).project(torch.tensor([[[[0.9, 0.5]]]]), torch.tensor([[[[0.5, 0.25]]]])).tolist()
        [[[[0.75, 0.5]]]]
    """

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """Return the largest change of a pixel, (B,)."""
        return delta_BCHW.flatten(1).abs().amax(dim=1)

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return sign(g): <g, d> <= |g|_1 for all d of length 1, with equality for d = sign(g)."""
        return grad_BCHW.sign()

    def project(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """Return the nearest point, which each pixel determines alone."""
        inside_BCHW = torch.min(torch.max(x_adv_BCHW, x_BCHW - self.eps), x_BCHW + self.eps)
        return inside_BCHW.clamp(0.0, 1.0)

    def noise(self, keys_B: Tensor, shape: Sequence[int]) -> Tensor:
        """Return numbers that are uniform on [-1, 1)."""
        return 2 * uniform(keys_B, shape) - 1

    def ascend(
        self, x: Tensor, x_adv: Tensor, direction: Tensor, step: Tensor, weight: Tensor, displacement: Tensor
    ) -> Tensor:
        """Return the same point with fewer passes over the pixels and the same bits as the published operations.

        Only exact products, with a sign or with 1/4, are fused with a sum.
        """
        low, high = (x - self.eps).clamp_(min=0), (x + self.eps).clamp_(max=1)
        z = torch.addcmul(x_adv, direction, step).clamp_(low, high)
        z.sub_(x_adv).mul_(weight).add_(x_adv).add_(displacement, alpha=1 - MOMENTUM)
        return z.clamp_(low, high)

"""L2, the Euclidean norm: all pixels together may move by the radius."""

from torch import Tensor

from ..config.register import NORMS
from .ball import TINY, Ball, per_image


@NORMS("L2", describes="Euclidean norm of all changes: at most eps", order=2, usual="0.5 on CIFAR-10")
class L2(Ball):
    """L2: steps follow the gradient, and points outside of the ball are scaled back to the sphere.

    Example:
        >>> import torch
        >>> L2(0.5).length(torch.tensor([[[[0.3, 0.4]]]])).tolist()
        [0.5]
    """

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """Return the root of the sum of squares, (B,)."""
        return delta_BCHW.flatten(1).square().sum(dim=1).sqrt()

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return g / |g|: by Cauchy and Schwarz, <g, d> <= |g| |d|, with equality in this direction."""
        return grad_BCHW / (per_image(self.length(grad_BCHW), grad_BCHW) + TINY)

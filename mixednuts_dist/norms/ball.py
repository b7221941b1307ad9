"""Norms: the ball of one radius around each image, restricted to the pixel range [0, 1] (the box).

To add a norm, register a subclass of `Ball` in a separate file, in this folder or anywhere else (then name the file in
the configuration: `extensions: [my_norm.py]`). `L2` is an example: `length` and `steepest` are enough. Override
`project`, `noise`, `random_start` or `ascend` if the defaults do not suit the norm.

The decorator takes literals: the radii that a threat model may have (`usual`, a text for messages, `smallest` and
`largest`), and `in_255ths` (messages write a radius as a fraction of 255).

APGD, PGD and the joint attack work in every norm. FAB and Square have separate mathematics for each norm, and their
register entries list the norms that they support, so a new norm is rejected.

Shapes: B images of C x H x W.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..config.register import NORMS
from ..config.threat import ThreatModel
from .random import normal, uniform

ULP = 2.0**-23  # two rounding errors of float32 near 1: that of x + eps, and that of its distance to x
TINY = 1e-12  # added to lengths before divisions, as published
MOMENTUM = 0.75  # weight of the new step in APGD; the last displacement has the weight 1 - MOMENTUM


class Ball:
    """All `x'` with `||x' - x|| <= eps` and `x'` in [0, 1]. Each subclass implements one norm."""

    rounding: ClassVar[float] = 1e-6  # tolerance of `contains`, as a share of the radius; float32 rounds lengths
    sparse: ClassVar[bool] = False  # whether a steepest step moves few pixels; then APGD uses `SparseApgd`

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """Return the norm of each perturbation, (B,)."""
        raise NotImplementedError

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return the d of length 1 that maximizes <grad, d>, (B, C, H, W), in new memory; 0 where the gradient is 0."""
        raise NotImplementedError

    def project(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """Return a point of the ball for each `x_adv`: scaled back to the sphere and clipped to [0, 1], as published.

        In general, it is not the nearest point.
        """
        delta_BCHW = x_adv_BCHW - x_BCHW
        length_B111 = per_image(self.length(delta_BCHW), delta_BCHW)
        unit_BCHW = delta_BCHW / (length_B111 + TINY)
        return (x_BCHW + unit_BCHW * length_B111.clamp(max=self.eps)).clamp(0.0, 1.0)

    def contains(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """Return (B,) bool: whether each `x_adv` is within the radius, up to rounding."""
        return self.length(x_adv_BCHW - x_BCHW) <= self.eps * (1 + self.rounding) + ULP

    def noise(self, keys_B: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a random perturbation per key, (B, *shape), of any length; by default normally distributed."""
        return normal(keys_B, shape)

    def random_start(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Return APGD's start: the image plus a random direction scaled to the sphere, clipped to [0, 1].

        The noise depends only on `keys_B`: a hash of (seed, attack, restart, sample id) for each image.
        """
        noise_BCHW = self.noise(keys_B, x_BCHW.shape[1:]).to(x_BCHW)
        unit_BCHW = noise_BCHW / (per_image(self.length(noise_BCHW), noise_BCHW) + TINY)
        return (x_BCHW + self.eps * unit_BCHW).clamp(0.0, 1.0)

    def ascend(
        self, x: Tensor, x_adv: Tensor, direction: Tensor, step: Tensor, weight: Tensor, displacement: Tensor
    ) -> Tensor:
        """Return APGD's next point, P(x_adv + a (P(x_adv + step direction) - x_adv) + (1 - a) displacement).

        P is the projection, and a is `weight`: `MOMENTUM`, or 1 in the first step. `step` and `weight` have the shape
        (B, 1, 1, 1), the other arguments (B, C, H, W).
        """
        z = self.project(x_adv + step * direction, x)
        return self.project(x_adv + (z - x_adv) * weight + displacement * (1 - weight), x)


@NORMS("Linf", order=1, usual="8/255 on CIFAR-10", largest=1.0, in_255ths=True)
class Linf(Ball):
    """Maximum norm: each pixel may change by eps.

    Example:
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


@NORMS("L2", describes="Euclidean norm of all changes: at most eps", order=2, usual="0.5 on CIFAR-10")
class L2(Ball):
    """L2: steps follow the gradient, and points outside of the ball are scaled back to the sphere.

    Example:
        >>> L2(0.5).length(torch.tensor([[[[0.3, 0.4]]]])).tolist()
        [0.5]
    """

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """Return the root of the sum of squares, (B,)."""
        return delta_BCHW.flatten(1).square().sum(dim=1).sqrt()

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return g / |g|: by Cauchy and Schwarz, <g, d> <= |g| |d|, with equality in this direction."""
        return grad_BCHW / (per_image(self.length(grad_BCHW), grad_BCHW) + TINY)


def ball_of(threat: ThreatModel) -> Ball:
    """Return the ball of a threat model: an object of its norm, with its radius."""
    ball: Ball = NORMS.get(threat.norm)(threat.eps)
    return ball


def per_image(values_B: Tensor, like_BCHW: Tensor) -> Tensor:
    """Return `values_B` with as many trailing axes of length 1 as an image has, for broadcasting."""
    return values_B.view(-1, *[1] * (like_BCHW.dim() - 1))

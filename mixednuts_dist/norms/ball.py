"""Norms: the ball of one radius around each image, restricted to the pixel range [0, 1] (the box).

To add a norm, register a subclass of `Ball` in a separate file, in this folder or anywhere else (then name the file in
the configuration: `extensions: [my_norm.py]`)::

    @NORMS("L4", describes="fourth root of the sum of fourth powers", usual="0.1", largest=4.0)
    class L4(Ball):
        def length(self, delta_BCHW):
            return delta_BCHW.flatten(1).pow(4).sum(dim=1).pow(0.25)

        def steepest(self, grad_BCHW):
            step_BCHW = grad_BCHW.sign() * grad_BCHW.abs().pow(1 / 3)
            return step_BCHW / (per_image(self.length(step_BCHW), step_BCHW) + TINY)

The decorator takes literals: the radii that a threat model may have (`usual`, a text for messages, `smallest` and
`largest`), and `in_255ths` (messages write a radius as a fraction of 255).

`length` and `steepest` are enough. Override `project`, `noise`, `random_start` or `ascend` if the defaults do not suit
the norm. APGD, PGD and the joint attack work in every norm. FAB and Square have separate mathematics for each norm, and
their register entries list the norms that they support, so a new norm is rejected.

Shapes: B images of C x H x W.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..config.register import NORMS
from ..config.threat import ThreatModel
from .random import normal

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


def ball_of(threat: ThreatModel) -> Ball:
    """Return the ball of a threat model: an object of its norm, with its radius."""
    ball: Ball = NORMS.get(threat.norm)(threat.eps)
    return ball


def per_image(values_B: Tensor, like_BCHW: Tensor) -> Tensor:
    """Return `values_B` with as many trailing axes of length 1 as an image has, for broadcasting."""
    return values_B.view(-1, *[1] * (like_BCHW.dim() - 1))

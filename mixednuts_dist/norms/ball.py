"""Norms: the ball of one radius around each image, cut at the pixel range [0, 1].

To add a norm, register a subclass of `Ball` in a separate file, in this folder or anywhere else (then name the file in
the configuration: `extensions: [my_norm.py]`)::

    @NORMS("L4", describes="fourth root of the sum of fourth powers", usual="0.1", largest=4.0)
    class L4(Ball):
        def length(self, delta_BCHW):
            return delta_BCHW.flatten(1).pow(4).sum(dim=1).pow(0.25)

        def steepest(self, grad_BCHW):
            step_BCHW = grad_BCHW.sign() * grad_BCHW.abs().pow(1 / 3)
            return step_BCHW / (per_image(self.length(step_BCHW), step_BCHW) + TINY)

The decorator's facts are the radii that a threat model may have; they are literal, so that a configuration is checked
without torch: `usual` (text, for messages), `smallest`, `largest`, and `in_255ths`, whether a radius is a pixel's.
APGD, PGD and the joint attack work in every norm. FAB and Square have separate mathematics for each norm, and their
register entries list the norms that they support.

Shapes: B images of C x H x W.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..config.register import NORMS
from ..config.threat import ThreatModel
from .random import normal

ULP = 2.0**-23  # twice what float32 rounds a pixel near 1 by: x + eps and its distance from x are each rounded once
TINY = 1e-12  # guards divisions by a length, as published
MOMENTUM = 0.75  # APGD's weight of the new step against the last displacement


class Ball:
    """All `x'` with `||x' - x|| <= eps` and `x'` in [0, 1]; a subclass is a norm."""

    rounding: ClassVar[float] = 1e-6  # share of the radius; float32 rounds points on the sphere to both sides
    sparse: ClassVar[bool] = False  # steepest directions move few pixels: APGD takes those of `SparseApgd`

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """The norm of each perturbation, (B,)."""
        raise NotImplementedError

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return the d of length 1 that maximizes <grad, d>, (B, C, H, W), in new memory; 0 where the gradient is 0."""
        raise NotImplementedError

    def project(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """A point of the ball for each `x_adv`, (B, C, H, W).

        Points outside are scaled back to the sphere and cut at the box, as in the published APGD. In general this is
        not the nearest point.
        """
        delta_BCHW = x_adv_BCHW - x_BCHW
        length_B111 = per_image(self.length(delta_BCHW), delta_BCHW)
        unit_BCHW = delta_BCHW / (length_B111 + TINY)
        return (x_BCHW + unit_BCHW * length_B111.clamp(max=self.eps)).clamp(0.0, 1.0)

    def contains(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """(B,) bool: whether each `x_adv` is within the radius, up to rounding."""
        return self.length(x_adv_BCHW - x_BCHW) <= self.eps * (1 + self.rounding) + ULP

    def noise(self, keys_B: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a random perturbation per key, (B, *shape), of any length; by default normally distributed."""
        return normal(keys_B, shape)

    def random_start(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Return APGD's start: a random direction scaled to the sphere, clipped to [0, 1].

        `keys_B` are `key_number`s of (seed, attack, restart, sample id); the noise depends on nothing else.
        """
        noise_BCHW = self.noise(keys_B, x_BCHW.shape[1:]).to(x_BCHW)
        unit_BCHW = noise_BCHW / (per_image(self.length(noise_BCHW), noise_BCHW) + TINY)
        return (x_BCHW + self.eps * unit_BCHW).clamp(0.0, 1.0)

    def ascend(
        self, x: Tensor, x_adv: Tensor, direction: Tensor, step: Tensor, weight: Tensor, displacement: Tensor
    ) -> Tensor:
        """Return APGD's next point, P(x_adv + a (P(x_adv + step direction) - x_adv) + (1 - a) displacement).

        P is the projection; a, `weight`, is `MOMENTUM`, or 1 where `displacement` is 0. `step` and `weight` are
        (B, 1, 1, 1), the others (B, C, H, W).
        """
        z = self.project(x_adv + step * direction, x)
        return self.project(x_adv + (z - x_adv) * weight + displacement * (1 - weight), x)


def ball_of(threat: ThreatModel) -> Ball:
    """The norm's object for the radius of `threat`."""
    ball: Ball = NORMS.get(threat.norm)(threat.eps)
    return ball


def per_image(values_B: Tensor, like_BCHW: Tensor) -> Tensor:
    """`values_B` with as many trailing axes of length 1 as an image has, for broadcasting."""
    return values_B.view(-1, *[1] * (like_BCHW.dim() - 1))

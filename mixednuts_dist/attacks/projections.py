"""The balls of the threat model: projections, normalised directions and keyed random starts.

Shapes: B images of C x H x W.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..threat import Norm, ThreatModel

_TINY = 1e-12


def per_image(values_B: Tensor, like_BCHW: Tensor) -> Tensor:
    """`values_B` with as many trailing axes of length 1 as an image has, for broadcasting."""
    return values_B.view(-1, *[1] * (like_BCHW.dim() - 1))


def l2_norm(delta_BCHW: Tensor) -> Tensor:
    """Euclidean norm of each image, broadcastable to it."""
    return per_image(delta_BCHW.flatten(1).square().sum(dim=1).sqrt(), delta_BCHW)


def normalized(delta_BCHW: Tensor, norm: Norm) -> Tensor:
    """`delta` scaled to norm 1, image by image."""
    if norm == "Linf":
        return delta_BCHW / (per_image(delta_BCHW.flatten(1).abs().amax(dim=1), delta_BCHW) + _TINY)
    return delta_BCHW / (l2_norm(delta_BCHW) + _TINY)


def steepest(grad_BCHW: Tensor, norm: Norm) -> Tensor:
    """The direction of steepest ascent of unit length in the norm."""
    return grad_BCHW.sign() if norm == "Linf" else normalized(grad_BCHW, norm)


def project(x_adv_BCHW: Tensor, x_BCHW: Tensor, threat: ThreatModel) -> Tensor:
    """The point of the ball around `x` and of [0, 1] that APGD uses for `x_adv` (L2: the ball, then the box)."""
    if threat.norm == "Linf":
        inside_BCHW = torch.min(torch.max(x_adv_BCHW, x_BCHW - threat.eps), x_BCHW + threat.eps)
        return inside_BCHW.clamp(0.0, 1.0)
    delta_BCHW = x_adv_BCHW - x_BCHW
    length_B111 = l2_norm(delta_BCHW).clamp(max=threat.eps)
    return (x_BCHW + normalized(delta_BCHW, "L2") * length_B111).clamp(0.0, 1.0)


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator that depends on `key` alone, so that noise follows the image and not the process."""
    return torch.Generator().manual_seed(key_number(*key))


def key_number(*key: object) -> int:
    """A seed for a generator on any device, from the parts of a key."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def random_start(x_BCHW: Tensor, keys: Sequence[tuple[object, ...]], threat: ThreatModel) -> Tensor:
    """APGD's start: a random direction scaled to the sphere of radius eps, clamped to [0, 1].

    `keys` holds one key an image, (seed, attack, restart, sample id).
    """
    draw = torch.rand if threat.norm == "Linf" else torch.randn
    noise = [draw(x_BCHW.shape[1:], generator=keyed_generator(*key)) for key in keys]
    noise_BCHW = torch.stack(noise).to(x_BCHW)
    if threat.norm == "Linf":
        noise_BCHW = 2 * noise_BCHW - 1
    return (x_BCHW + threat.eps * normalized(noise_BCHW, threat.norm)).clamp(0.0, 1.0)

"""Defenses that change the images or layers of a classifier: two are random, and two mask the gradient.

Each of the two that mask the gradient also has a version with a handwritten backward pass.

Shapes: B images of C x H x W.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixednuts_dist.errors import InvalidInputError

_BLOCK = 8  # pixels: JPEG's
_LUMA = (0.299, 0.587, 0.114)


class Before(nn.Module):
    """A classifier preceded by a function of the images; with `by_hand`, gradients skip that function."""

    def __init__(self, function: Callable[[Tensor], Tensor], net: nn.Module, by_hand: bool = False) -> None:
        super().__init__()
        self.function, self.net, self.by_hand = function, net, by_hand

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the classifier's logits, (B, K)."""
        changed_BCHW = self.function(x_BCHW)
        if self.by_hand and torch.is_grad_enabled():
            changed_BCHW = x_BCHW + (changed_BCHW - x_BCHW).detach()
        logits_BK: Tensor = self.net(changed_BCHW)
        return logits_BK


def noisy(x_BCHW: Tensor, scale: float) -> Tensor:
    """Add normally distributed noise to every pixel."""
    return x_BCHW + scale * torch.randn_like(x_BCHW)


class Dropping(nn.Module):
    """A classifier whose linear layers lose a random share of their inputs, as if dropout stayed on."""

    def __init__(self, net: nn.Module, share: float) -> None:
        super().__init__()
        self.net, self.share = net, share
        linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise InvalidInputError("the classifier has no linear layer for dropout. Use the defense noise")
        for module in linear:
            module.register_forward_pre_hook(lambda _, given: F.dropout(given[0], self.share, training=True))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the classifier's logits, (B, K)."""
        logits_BK: Tensor = self.net(x_BCHW)
        return logits_BK


def rounded(x_BCHW: Tensor, levels: float) -> Tensor:
    """Round every pixel to one of `levels` + 1 values."""
    return (levels * x_BCHW).round() / levels


def jpeg(x_BCHW: Tensor, step: float) -> Tensor:
    """Round the frequencies of 8 x 8 blocks of luma and chroma as JPEG does, with larger steps for higher frequencies.

    `step` is the step of the lowest frequency. Steps of chroma are twice as large. Images are padded to whole blocks.
    """
    height, width = x_BCHW.shape[2:]
    to_luma_CC = _colours(x_BCHW)
    planes = torch.einsum("dc,bchw->bdhw", to_luma_CC, x_BCHW)
    planes = F.pad(planes, (0, -width % _BLOCK, 0, -height % _BLOCK), mode="replicate")
    blocks = planes.unfold(2, _BLOCK, _BLOCK).unfold(3, _BLOCK, _BLOCK)  # (B, C, H / 8, W / 8, 8, 8)
    dct, order = _dct(x_BCHW), torch.arange(_BLOCK).to(x_BCHW)
    wider = torch.tensor([1.0] + [2.0] * (len(to_luma_CC) - 1)).to(x_BCHW)
    steps = step * wider.view(-1, 1, 1, 1, 1) * (1 + order[:, None] + order)
    kept = dct.T @ (((dct @ blocks @ dct.T) / steps).round() * steps) @ dct
    planes = kept.permute(0, 1, 2, 4, 3, 5).reshape(planes.shape)[:, :, :height, :width]
    return torch.einsum("dc,bchw->bdhw", torch.linalg.inv(to_luma_CC), planes).clamp(0, 1)


def _colours(like: Tensor) -> Tensor:
    """Return the matrix (C, C) from red, green and blue to luma and two color differences; the identity for gray."""
    if like.shape[1] != len(_LUMA):
        return torch.eye(like.shape[1]).to(like)
    red, green, blue = _LUMA
    rows = [
        [red, green, blue],
        [-red / (2 - 2 * blue), -green / (2 - 2 * blue), 0.5],
        [0.5, -green / (2 - 2 * red), -blue / (2 - 2 * red)],
    ]
    return torch.tensor(rows).to(like)


def _dct(like: Tensor) -> Tensor:
    """Return the orthogonal (8, 8) matrix of the discrete cosine transform; row k is the cosine of frequency k."""
    k, n = torch.meshgrid(torch.arange(_BLOCK), torch.arange(_BLOCK), indexing="ij")
    rows = torch.cos(math.pi * k * (2 * n + 1) / (2 * _BLOCK)) * math.sqrt(2 / _BLOCK)
    rows[0] /= math.sqrt(2)
    return rows.to(like)


@dataclass(frozen=True)
class Defense:
    """One kind of defense: functions from a classifier and a strength to the defended classifier."""

    behind: Callable[[nn.Module, float], nn.Module]
    by_hand: Callable[[nn.Module, float], nn.Module] | None = None  # the same values, handwritten gradients


def _before(
    function: Callable[[Tensor, float], Tensor], by_hand: bool = False
) -> Callable[[nn.Module, float], nn.Module]:
    return lambda net, strength: Before(lambda x: function(x, strength), net, by_hand)


DEFENSES = {
    "noise": Defense(_before(noisy)),
    "dropout": Defense(Dropping),
    **{
        name: Defense(_before(function), _before(function, by_hand=True))
        for name, function in (("rounded", rounded), ("jpeg", jpeg))
    },
}


def defense_named(text: str) -> tuple[Defense, float]:
    """Return the kind and the strength in a text such as `noise:0.1`.

    Raises:
        InvalidInputError: for another kind, or a strength that is not a positive number.
    """
    kind, _, strength = text.partition(":")
    try:
        return DEFENSES[kind], float(strength)
    except (KeyError, ValueError):
        raise InvalidInputError(
            f"{text!r} is not a known defense. Valid: {', '.join(f'{name}:STRENGTH' for name in DEFENSES)}"
        ) from None

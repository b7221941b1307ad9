"""Maps of the robust classifier's logits (paper, section 4.2): LayerNorm, clamps and the nonlinear transformation.

All maps compute in float64 and return the caller's dtype, on the caller's device.

Shapes: B images, K classes.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..config.register import CLAMPS
from ..errors import InvalidInputError
from .clamps import Clamp

DEFAULT_LN_K = 250  # as in the paper for ImageNet; with fewer classes, LayerNorm uses all of them
LN_EPS = 1e-8
_STEEP = 1e-12  # below this |v| the unbounded slope of |v|^p, p < 1, is taken as 0


def layer_norm_logits(logits_BK: Tensor, ln_k: int | None = None) -> Tensor:
    """Return `(z - mean) / sqrt(var + 1e-8)`, with mean and unbiased variance of each row's `ln_k` largest logits.

    `ln_k=None` means all classes up to K = 250 and the top 250 beyond.

    >>> layer_norm_logits(torch.tensor([[3.0, 2.0, 1.0]])).tolist()
    [[1.0, 0.0, -1.0]]

    Raises:
        InvalidInputError: for fewer than 2 classes, or `ln_k` outside [2, K].
    """
    if logits_BK.ndim != 2:
        raise InvalidInputError(f"logits must have the shape (images, classes), got {tuple(logits_BK.shape)}")
    z_BK, width = logits_BK.double(), resolve_ln_k(ln_k, logits_BK.shape[1])
    mean_B1, deviation_B1 = norm_statistics(z_BK if width == z_BK.shape[1] else z_BK.topk(width, dim=1).values)
    return ((z_BK - mean_B1) / deviation_B1).to(logits_BK.dtype)


def resolve_ln_k(ln_k: int | None, n_classes: int) -> int:
    """Return the number of top classes that LayerNorm's statistics use for `n_classes` classes."""
    if n_classes < 2:
        raise InvalidInputError(f"LayerNorm needs at least 2 classes, got K={n_classes}")
    if ln_k is None:
        return min(n_classes, DEFAULT_LN_K)
    if not 2 <= ln_k <= n_classes:
        hint = "one logit has no variance" if ln_k < 2 else "there are fewer classes"
        raise InvalidInputError(f"ln_k={ln_k} must be in [2, K={n_classes}]: {hint}; ln_k=None chooses for you")
    return ln_k


def signed_power(v_BK: Tensor, power: float) -> Tensor:
    """Return `|v|^p sign(v)`, elementwise, with a finite gradient everywhere (0 at v = 0 if p < 1)."""
    if power == 1:
        return v_BK
    size_BK = v_BK.abs()
    if power > 1:
        return v_BK.sign() * size_BK**power
    away_BK = size_BK.clamp_min(_STEEP) ** power
    return v_BK.sign() * torch.where(size_BK > _STEEP, away_BK, size_BK.detach() ** power)


class LogitMap(nn.Module):
    """Base class of maps of the robust classifier's logits; subclasses define `map_float64` and `settings`."""

    def map_float64(self, logits_BK: Tensor) -> Tensor:
        """Return the mapped logits; input and output are float64."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments that build this map again."""
        return {}

    def forward(self, logits_BK: Tensor) -> Tensor:
        """Return mapped logits in the dtype of `logits_BK`."""
        return self.map_float64(logits_BK.double()).to(logits_BK.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings().items())


class IdentityTransform(LogitMap):
    """The unchanged logits of the robust classifier: the baseline that the paper calls "Mixed"."""

    def map_float64(self, logits_BK: Tensor) -> Tensor:
        return logits_BK


class LayerNormTransform(LogitMap):
    """LayerNorm alone: the map after which the attack stage minimizes margins."""

    def __init__(self, ln_k: int | None = None) -> None:
        super().__init__()
        self.ln_k = ln_k

    def map_float64(self, logits_BK: Tensor) -> Tensor:
        return layer_norm_logits(logits_BK, self.ln_k)

    def settings(self) -> dict[str, Any]:
        return {"ln_k": self.ln_k}


class LogitTransform(LogitMap):
    """The nonlinear transformation M(s, p, c): `s |v|^p sign(v)` with `v = Clamp(LN(z) + c)` (paper, section 4.2).

    Raises:
        InvalidInputError: for a scale or a power that is not positive, a bias that is not finite, an unknown clamp.
    """

    def __init__(self, scale: float, power: float, bias: float, clamp: Clamp = "gelu", ln_k: int | None = None) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("power", power)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidInputError(f"{name}={value} must be positive and finite")
        if not math.isfinite(bias):
            raise InvalidInputError(f"bias={bias} must be finite")
        self._clamped = CLAMPS.get(clamp)  # looked up here: torch.export of torch 2.6 cannot trace the register
        if ln_k is not None and ln_k < 2:
            raise InvalidInputError(f"ln_k={ln_k} must be at least 2: one logit has no variance")
        self.scale, self.power, self.bias = float(scale), float(power), float(bias)
        self.clamp = clamp
        self.ln_k = ln_k

    def map_float64(self, logits_BK: Tensor) -> Tensor:
        v_BK = self._clamped(layer_norm_logits(logits_BK, self.ln_k) + self.bias)
        return self.scale * signed_power(v_BK, self.power)

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "power": self.power, "bias": self.bias, "clamp": self.clamp, "ln_k": self.ln_k}


LOGIT_MAPS: dict[str, type[LogitMap]] = {
    "nonlinear": LogitTransform,
    "identity": IdentityTransform,
    "layer_norm": LayerNormTransform,
}


def norm_statistics(top_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and `sqrt(variance + 1e-8)` of each row of top logits, both (B, 1), for LayerNorm.

    The unbiased variance is written out because `torch.var_mean` warns about an empty batch, and a branch on the number
    of rows would make `torch.export` specialize on it. Subtracting the mean before squaring avoids cancellation.
    """
    mean_B1 = top_BK.mean(dim=1, keepdim=True)
    variance_B1 = (top_BK - mean_B1).square().sum(dim=1, keepdim=True) / (top_BK.shape[1] - 1)
    return mean_B1, (variance_B1 + LN_EPS).sqrt()

"""The threat model: which perturbations an adversary may use."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ThreatModelError

Norm = Literal["Linf", "L2"]


@dataclass(frozen=True)
class ThreatModel:
    """All `x'` with `||x' - x||_norm <= eps` and `x'` in [0, 1]; `eps` in units of the pixel range [0, 1].

    Raises:
        ThreatModelError: for an unknown norm, or a radius that is not positive and finite; under Linf also above 1.
    """

    norm: Norm
    eps: float

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ThreatModelError(f"norm={self.norm!r} is not known; valid norms: {', '.join(get_args(Norm))}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ThreatModelError(f"eps={self.eps} must be positive and finite; the usual Linf radius is 8/255")
        if self.norm == "Linf" and self.eps > 1:
            raise ThreatModelError(
                f"eps={self.eps} exceeds the pixel range [0, 1] for norm 'Linf'; did you mean {self.eps:g}/255?"
            )

"""The threat model: which perturbations an adversary may use."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ThreatModelError

Norm = Literal["Linf", "L2"]


@dataclass(frozen=True)
class ThreatModel:
    """All `x'` with `||x' - x||_norm <= eps` and `x'` in [0, 1]; `eps` in units of the pixel range [0, 1].

    As text it names a Linf radius in grey levels where that is the shorter way to write it.

    Example:
        >>> [str(ThreatModel("Linf", eps)) for eps in (8 / 255, 0.25 / 255, 0.15)]
        ['Linf, eps = 8/255', 'Linf, eps = 0.25/255', 'Linf, eps = 0.15']

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

    def __str__(self) -> str:
        plain, levels = f"{self.eps:g}", f"{round(self.eps * 255, 6):g}/255"
        return f"{self.norm}, eps = {levels if self.norm == 'Linf' and len(levels) <= len(plain) else plain}"

"""The threat model: the perturbations that an adversary may use."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInputError, ThreatModelError
from .register import ATTACKS, NORMS


@dataclass(frozen=True)
class ThreatModel:
    """All `x'` with `||x' - x||_norm <= eps` and `x'` in [0, 1]; `eps` in units of the pixel range [0, 1].

    `norm` is a name in the register `NORMS`, whose entry defines the valid radii. `str` writes the radius as a multiple
    of 1/255 if that is not longer.

    Example:
        >>> [str(ThreatModel("Linf", eps)) for eps in (8 / 255, 0.25 / 255, 0.15)]
        ['Linf, eps = 8/255', 'Linf, eps = 0.25/255', 'Linf, eps = 0.15']

    Raises:
        ThreatModelError: for an unknown norm, or a radius that is not positive, not finite, or not valid for the norm.
    """

    norm: str
    eps: float

    def __post_init__(self) -> None:
        try:
            NORMS.check(self.norm)
        except InvalidInputError as error:
            raise ThreatModelError(str(error)) from None
        given: object = self.eps  # a caller may pass the text that a configuration accepts
        if isinstance(given, str):
            raise ThreatModelError(f"eps={given!r} is text; give a number: eps={given}")
        facts = NORMS.entries()[self.norm].facts
        usual, smallest, largest = (facts.get(key) for key in ("usual", "smallest", "largest"))
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ThreatModelError(f"eps={self.eps} must be positive and finite; usual for {self.norm}: {usual}")
        if largest is not None and self.eps > largest:
            raise ThreatModelError(
                f"eps={self.eps} exceeds the pixel range [0, {largest:g}] for norm {self.norm!r}; did you mean "
                f"{self.eps:g}/255?"
            )
        if smallest is not None and self.eps < smallest:
            raise ThreatModelError(
                f"eps={self.eps:.4g} is too small for norm {self.norm!r}: its radii begin at {smallest:g}, and usual "
                f"is {usual}"
            )

    def __str__(self) -> str:
        plain, levels = f"{self.eps:g}", f"{round(self.eps * 255, 6):g}/255"
        short = levels if NORMS.entries()[self.norm].facts.get("in_255ths") and len(levels) <= len(plain) else plain
        return f"{self.norm}, eps = {short}"


def check_threat(threat: Any) -> None:
    """Raise an InvalidInputError, with a call that makes a threat model, if the argument is not one."""
    if not isinstance(threat, ThreatModel):
        raise InvalidInputError(f"threat={threat!r} is {type(threat).__name__}; give ThreatModel('Linf', 8 / 255)")


def check_norm(attacks: Iterable[str], norm: str) -> None:
    """Raise a ThreatModelError unless the attacks support a norm.

    An entry of `ATTACKS` without the fact `norms` supports all of them.
    """
    entries = ATTACKS.entries()
    fitting = [name for name, entry in entries.items() if norm in entry.facts.get("norms", (norm,))]
    for attack in attacks:
        if attack in entries and attack not in fitting:
            raise ThreatModelError(
                f"attack {attack!r} supports the norms {', '.join(entries[attack].facts['norms'])}, not {norm!r}. "
                f"Attacks in {norm!r}: {', '.join(fitting)}"
            )

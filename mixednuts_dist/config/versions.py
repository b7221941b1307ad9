"""AutoAttack's versions by name, and the preset fast: which attacks, and with how many restarts, targets and draws."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError


@dataclass(frozen=True)
class Version:
    """What a version is made of; iterations, targets and queries are an `AttackBudget`'s defaults."""

    attacks: tuple[str, ...]
    eot: int | None = None  # draws of a random classifier that gradients are averaged over
    n_restarts: int = 1  # of APGD-CE, APGD-DLR and untargeted FAB
    own: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)  # norm -> attack -> otherwise


VERSIONS = {
    "standard": Version(
        ("apgd-ce", "apgd-t", "fab-t", "square"),
        own={"L1": {"apgd-ce": {"n_restarts": 5}, "apgd-t": {"n_target_classes": 5}}},
    ),
    "plus": Version(("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"), n_restarts=5),
    "rand": Version(("apgd-ce", "apgd-dlr"), eot=20),
}


def version_named(name: str) -> Version:
    """The version of that name.

    Raises:
        InvalidInputError: for an unknown one; it lists those that there are.
    """
    if name not in VERSIONS:
        close = difflib.get_close_matches(str(name)[:80], VERSIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise InvalidInputError(f"version {str(name)[:80]!r} is not known{hint} Versions: {', '.join(VERSIONS)}")
    return VERSIONS[name]


# What `preset: fast` stands for, and of how many images that standard broke it missed how many (docs/validation.md).
FAST: dict[str, Any] = {"attacks": ["apgd-ce", "apgd-t"], "n_iter": 100, "n_target_classes": 3, "joint_starts": 1}
_FAST_MISSED, _FAST_OF = 0, 275


def fast_notes(evaluate: Mapping[str, Any]) -> list[str]:
    """What to say beside results of the fast preset's settings, as run.yaml has them; nothing for others."""
    if any(evaluate.get(key) != value for key, value in FAST.items()):
        return []
    return [
        f"The fast preset is not AutoAttack: of {_FAST_OF} images that the standard attacks broke on the calibration "
        f"classifiers it missed {_FAST_MISSED or 'none'} (docs/validation.md)."
    ]

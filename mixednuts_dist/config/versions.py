"""The versions of AutoAttack and the preset `fast`: attacks, and numbers of restarts, targets and draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError
from .register import unknown_name


@dataclass(frozen=True)
class Version:
    """A version of AutoAttack. Iterations, targets and queries are the defaults of `AttackBudget`."""

    attacks: tuple[str, ...]
    eot: int | None = None  # number of draws of a random classifier per gradient
    n_restarts: int = 1  # APGD-CE, APGD-DLR and untargeted FAB use it
    own: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)  # norm -> attack -> other values


VERSIONS = {
    "standard": Version(
        ("apgd-ce", "apgd-t", "fab-t", "square"),
        own={"L1": {"apgd-ce": {"n_restarts": 5}, "apgd-t": {"n_target_classes": 5}}},
    ),
    "plus": Version(("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"), n_restarts=5),
    "rand": Version(("apgd-ce", "apgd-dlr"), eot=20),
}


def version_named(name: str) -> Version:
    """Return the version of that name, or raise an InvalidInputError that lists the valid names."""
    if name not in VERSIONS:
        raise InvalidInputError(unknown_name("version", name, VERSIONS))
    return VERSIONS[name]


# The values of `preset: fast`.
FAST: dict[str, Any] = {"attacks": ["apgd-ce", "apgd-t"], "n_iter": 100, "n_target_classes": 3, "joint_starts": 1}

"""The iterations, targets and queries that attacks may spend per image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config.versions import VERSIONS, version_named
from ..errors import InvalidInputError

STANDARD_ATTACKS = VERSIONS["standard"].attacks
WARM_START = "warm-start"  # the step that tries the stored adversarial examples before any attack


@dataclass(frozen=True)
class AttackBudget:
    """How much an attack may spend on an image.

    Iterations, targets and queries are AutoAttack's by default. `border_restarts` and `joint_starts` are additions of
    this package to MMAA and to attacks on mixed classifiers; 0 leaves them out, as in the paper.

    Example:
        >>> AttackBudget(n_iter=20).n_queries
        5000
    """

    n_iter: int = 100  # iterations of APGD-CE, and of each target of APGD-T and FAB-T
    n_target_classes: int = 9  # targets of APGD-T and FAB-T, at most the number of classes minus 1
    n_queries: int = 5000  # queries of Square
    border_restarts: int = 2  # repeats of MMAA on borderline images
    joint_starts: int = 3  # most random starts of the joint attack per target; n_iter=100 allows 2
    n_restarts: int = 1  # starts of APGD-CE, APGD-DLR and untargeted FAB; FAB's first start is the clean image
    own: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # attack -> other values for this attack alone

    def __post_init__(self) -> None:
        for name in ("n_iter", "n_target_classes", "n_queries", "border_restarts", "joint_starts", "n_restarts"):
            value, least = getattr(self, name), 0 if name in ("border_restarts", "joint_starts") else 1
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
                raise InvalidInputError(f"{name}={value!r} must be an integer of at least {least}")

    def n_targets(self, n_classes: int) -> int:
        """Return the number of targets per image."""
        return min(self.n_target_classes, n_classes - 1)

    def of(self, attack: str) -> "AttackBudget":
        """Return the budget of one attack."""
        return replace(self, own={}, **self.own.get(attack, {}))

    def in_version(self, version: str, norm: str) -> "AttackBudget":
        """Return the budget with the restarts (at least) and targets (at most) of AutoAttack's version in this norm.

        Raises:
            InvalidInputError: for an unknown version.
        """
        named = version_named(version)
        own = {attack: dict(each) for attack, each in self.own.items()}
        for attack, each in named.own.get(norm, {}).items():
            mine = self.of(attack)
            chosen = {key: (max if key == "n_restarts" else min)(n, getattr(mine, key)) for key, n in each.items()}
            own[attack] = {**own.get(attack, {}), **chosen}
        return replace(self, n_restarts=max(named.n_restarts, self.n_restarts), own=own)


def attacks_in(version: str, attacks: Sequence[str] | None) -> Sequence[str]:
    """Return the named attacks, or those of AutoAttack's version.

    Raises:
        InvalidInputError: for attacks that another version than "standard" does not have, and an unknown version.
    """
    named = version_named(version).attacks
    if attacks is None:
        return named
    attacks = attacks if isinstance(attacks, str) else tuple(attacks)  # the checks would use up an iterator
    if version != "standard" and not {*attacks} <= {*named}:
        raise InvalidInputError(
            f"version={version!r} has the attacks {', '.join(named)}, not {', '.join(attacks)}. Leave out the version."
        )
    return attacks

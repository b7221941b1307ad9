"""The iterations, targets and queries that attacks may spend per image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.register import ATTACKS
from ..config.versions import VERSIONS, version_named
from ..errors import InvalidInputError

STANDARD_ATTACKS = VERSIONS["standard"].attacks
WARM_START = "warm-start"  # the step that tries the stored adversarial examples before any attack
_WORDS = {
    "n_iter": ("iteration", "iterations"),
    "n_target_classes": ("target", "targets"),
    "n_queries": ("query", "queries"),
}


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
            if value < least:
                raise InvalidInputError(f"{name}={value} must be at least {least}")

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
    if version != "standard" and not {*attacks} <= {*named}:
        raise InvalidInputError(
            f"version={version!r} has the attacks {', '.join(named)}, not {', '.join(attacks)}. Leave out the version."
        )
    return attacks


def is_autoattack(evaluate: Mapping[str, Any], norm: str) -> bool:
    """Return whether settings in run.yaml are exactly the attacks, restarts, targets, budgets and draws of AutoAttack.

    Example:
        >>> published = {"version": "standard", "attacks": STANDARD_ATTACKS, "n_iter": 100, "n_target_classes": 9}
        >>> [is_autoattack({**published, "n_queries": n}, "Linf") for n in (5000, 1)]
        [True, False]
    """
    name = evaluate.get("version", "standard")
    version, spent = version_named(name), AttackBudget(**{key: evaluate[key] for key in _WORDS})
    same_attacks = tuple(evaluate["attacks"]) == version.attacks and evaluate.get("eot") == version.eot
    return same_attacks and spent.in_version(name, norm) == AttackBudget().in_version(name, norm)


def attack_words(evaluate: Mapping[str, Any], norm: str) -> str:
    """Return the attacks and budgets of the settings, or "AutoAttack" if that is what they are."""
    if not is_autoattack(evaluate, norm):
        return spent_words(evaluate)
    version = evaluate.get("version", "standard")
    return "AutoAttack" if version == "standard" else f"AutoAttack {version}"


def spent_words(evaluate: Mapping[str, Any]) -> str:
    """Return the names of the attacks and the budgets that they use.

    Example:
        >>> spent_words({"attacks": ["apgd-ce", "square"], "n_iter": 100, "n_target_classes": 9, "n_queries": 5000})
        'apgd-ce, square (100 iterations, 5000 queries)'
    """
    attacks, entries = evaluate["attacks"], ATTACKS.entries()
    used = {option for name in attacks if name in entries for option in entries[name].facts.get("options", ())}
    spent = [f"{evaluate[key]} {words[evaluate[key] > 1]}" for key, words in _WORDS.items() if key in used]
    return ", ".join(attacks) + (f" ({', '.join(spent)})" if spent else "")

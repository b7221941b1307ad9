"""The one budget of all attacks, which travels whole from the configuration to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..config.register import ATTACKS
from ..config.versions import FAST, VERSIONS, version_named
from ..errors import InvalidInputError

Preset = Literal["standard", "fast"]
STANDARD_ATTACKS = VERSIONS["standard"].attacks
_MAY_BE_0 = ("border_restarts", "joint_starts")
_WORDS = {
    "n_iter": ("iteration", "iterations"),
    "n_target_classes": ("target", "targets"),
    "n_queries": ("query", "queries"),
}


@dataclass(frozen=True)
class AttackBudget:
    """How much an attack may spend on an image; the defaults are the published budgets.

    Example:
        >>> AttackBudget(n_iter=20).n_queries
        5000
    """

    n_iter: int = 100  # iterations of APGD-CE, and of each target of APGD-T and FAB-T
    n_target_classes: int = 9  # targets of APGD-T and FAB-T, capped to the classes less one
    n_queries: int = 5000  # of Square
    border_restarts: int = 2  # of MMAA: repeats for images that stand by a hair; 0 is the paper's budget
    joint_starts: int = 3  # random starts of the joint attack, on images that stand by a hair; 0 leaves it out
    n_restarts: int = 1  # random starts of APGD-CE and -DLR; of untargeted FAB, whose first is the clean image
    own: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # attack -> what it alone has otherwise

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name != "own"):
            value, least = getattr(self, name), int(name not in _MAY_BE_0)
            if value < least:
                raise InvalidInputError(f"{name}={value} must be at least {least}")

    def n_targets(self, n_classes: int) -> int:
        """Targets that an image has among `n_classes`."""
        most = max([self.n_target_classes, *(each.get("n_target_classes", 1) for each in self.own.values())])
        return min(most, n_classes - 1)

    def of(self, attack: str) -> "AttackBudget":
        """What one attack may spend."""
        return replace(self, own={}, **self.own.get(attack, {}))

    def in_version(self, version: str | None, norm: str) -> "AttackBudget":
        """With the restarts and targets of AutoAttack's version; iterations and queries stay.

        Raises:
            InvalidInputError: for an unknown version.
        """
        if version is None:
            return self
        named = version_named(version)
        own = {
            attack: {key: min(n, self.n_target_classes) if key == "n_target_classes" else n for key, n in each.items()}
            for attack, each in named.own.get(norm, {}).items()
        }
        return replace(self, n_restarts=named.n_restarts, own=own)


def attacks_in(version: str | None, attacks: Sequence[str] | None) -> Sequence[str]:
    """The attacks that were named, or those of the version; AutoAttack's standard ones where neither is given.

    Raises:
        InvalidInputError: for both, and for an unknown version.
    """
    if version is not None and attacks is not None:
        raise InvalidInputError(
            f"version={version!r} says which attacks run; leave it out to name attacks, or leave attacks out"
        )
    return version_named(version or "standard").attacks if attacks is None else attacks


def preset_attacks(
    preset: Preset, version: str | None, attacks: Sequence[str] | None, budget: AttackBudget | None
) -> tuple[Sequence[str], AttackBudget]:
    """The attacks and the budget of a preset, and in place of each what is given.

    Raises:
        InvalidInputError: for another preset, a budget that is a mapping, fast with a version; else as in `attacks_in`.

    Example:
        >>> attacks, budget = preset_attacks("fast", None, None, AttackBudget(n_iter=5))
        >>> attacks, budget.n_iter
        (('apgd-ce', 'apgd-t'), 5)
    """
    if preset not in get_args(Preset):
        raise InvalidInputError(f"preset={preset!r} is not known; valid: {', '.join(get_args(Preset))}")
    if isinstance(budget, Mapping):
        raise InvalidInputError(f"budget={budget} is a mapping; give AttackBudget(**{budget})")
    if preset == "standard":
        return attacks_in(version, attacks), budget or AttackBudget()
    if version is not None:
        raise InvalidInputError(f"version={version!r} and preset='fast' name two sets of attacks; leave one out")
    spent = {key: value for key, value in FAST.items() if key != "attacks"}
    named = FAST["attacks"] if attacks is None else attacks
    # One string is no list of names, which the entry's checks say.
    return (named if isinstance(named, str) else tuple(named)), budget or AttackBudget(**spent)


def is_autoattack(evaluate: Mapping[str, Any]) -> bool:
    """Whether settings, as run.yaml has them, leave out and shorten nothing of AutoAttack."""
    published = AttackBudget()
    return {*STANDARD_ATTACKS} <= {*evaluate["attacks"]} and all(
        evaluate[key] >= getattr(published, key) for key in _WORDS
    )


def attack_words(evaluate: Mapping[str, Any]) -> str:
    """What such settings run: attacks and budgets, or "AutoAttack" where that is what they are.

    Example:
        >>> attack_words({"attacks": ["apgd-ce"], "n_iter": 20, "n_target_classes": 9, "n_queries": 5000})
        'apgd-ce (20 iterations)'
    """
    if not is_autoattack(evaluate):
        return spent_words(evaluate)
    version = evaluate.get("version") or "standard"
    return "AutoAttack" if version == "standard" else f"AutoAttack {version}"


def spent_words(evaluate: Mapping[str, Any]) -> str:
    """The attacks by name, and the budgets that they use.

    Example:
        >>> spent_words({"attacks": ["apgd-ce", "square"], "n_iter": 100, "n_target_classes": 9, "n_queries": 5000})
        'apgd-ce, square (100 iterations, 5000 queries)'
    """
    attacks, entries = evaluate["attacks"], ATTACKS.entries()
    used = {option for name in attacks if name in entries for option in entries[name].facts.get("options", ())}
    spent = [f"{evaluate[key]} {words[evaluate[key] > 1]}" for key, words in _WORDS.items() if key in used]
    return ", ".join(attacks) + (f" ({', '.join(spent)})" if spent else "")

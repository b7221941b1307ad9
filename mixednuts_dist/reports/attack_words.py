"""The attacks and budgets of a configuration in words."""

from collections.abc import Mapping
from typing import Any

from ..attacks.budget import AttackBudget
from ..config.register import ATTACKS
from ..config.versions import version_named

_WORDS = {
    "n_iter": ("iteration", "iterations"),
    "n_target_classes": ("target", "targets"),
    "n_queries": ("query", "queries"),
}


def is_autoattack(evaluate: Mapping[str, Any], norm: str) -> bool:
    """Return whether settings in run.yaml are exactly the attacks, restarts, targets, budgets and draws of AutoAttack.

    Example:
        >>> published = {"attacks": version_named("standard").attacks, "n_iter": 100, "n_target_classes": 9}
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

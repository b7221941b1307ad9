"""AutoAttack's versions by name: what each consists of is pyautoattack's own, in every norm."""

from typing import Any

import pytest
from pyautoattack import AutoAttack

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget, attacks_in
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.versions import VERSIONS
from mixednuts_dist.errors import ConfigError, InvalidInputError
from mixednuts_dist.reports.attack_words import attack_words, is_autoattack
from mixednuts_dist.stages.stage import budget_of

CONTENT = {"name": "x", "data": {"uri": "digits"}, "rob": "demo:rob", "threat": {"norm": "L1", "eps": 12}}


@pytest.mark.parametrize("norm", ["Linf", "L2", "L1"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_the_published_one(version: str, norm: str) -> None:
    package = AutoAttack(lambda x: x, norm=norm, version=version)
    attacks, budget = attacks_in(version, None), AttackBudget().in_version(version, norm)
    assert list(attacks) == package.attacks_to_run
    theirs = {
        "apgd-ce": package.apgd, "apgd-dlr": package.apgd, "fab": package.fab, "apgd-t": package.apgd_targeted,
        "fab-t": package.fab, "square": package.square,
    }  # fmt: skip
    for name in attacks:
        own = budget.of(name)
        if name in ("apgd-ce", "apgd-dlr", "fab"):
            assert own.n_restarts == theirs[name].n_restarts
        if name in ("apgd-t", "fab-t"):
            assert own.n_target_classes == theirs[name].n_target_classes
        spent = own.n_queries if name == "square" else own.n_iter
        assert spent == (theirs[name].n_queries if name == "square" else theirs[name].n_iter)


def test_the_library_takes_a_version_or_attacks(victim) -> None:
    model, x, y = victim(n=4)
    options = {"threat": ThreatModel("Linf", 0.02), "budget": AttackBudget(n_iter=3, n_target_classes=1, n_queries=3)}
    found = autoattack(model, x, y, version="plus", **options)
    assert list(found.survived) == list(VERSIONS["plus"].attacks)
    alone = autoattack(model, x, y, version="plus", attacks=("square",), **options)
    assert list(alone.survived) == ["square"]
    with pytest.raises(InvalidInputError, match=r"version='rand' has the attacks apgd-ce, apgd-dlr, not square"):
        autoattack(model, x, y, version="rand", attacks=("square",), **options)
    with pytest.raises(InvalidInputError, match=r"version 'pluss' is not known; did you mean 'plus'\?"):
        autoattack(model, x, y, version="pluss", **options)


def test_a_configuration_takes_a_version_or_attacks() -> None:
    asked = parse_config({**CONTENT, "evaluate": {"version": "standard", "n_iter": 7}})
    assert asked.evaluate.attacks == VERSIONS["standard"].attacks
    budget = budget_of(asked.evaluate, "L1")
    assert (budget.of("apgd-ce").n_restarts, budget.of("apgd-t").n_target_classes, budget.n_iter) == (5, 5, 7)
    assert budget_of(asked.evaluate, "Linf").of("apgd-ce").n_restarts == 1
    assert parse_config(asked.model_dump(mode="json")) == asked
    assert parse_config({**CONTENT, "evaluate": {"n_iter": 7}}).run_id() == asked.run_id()
    assert parse_config({**CONTENT, "evaluate": {"version": "plus", "n_iter": 7}}).run_id() != asked.run_id()
    with pytest.raises(
        ConfigError,
        match=r"evaluate: version: plus defines which attacks run. Remove version, or attacks and preset: fast",
    ):
        parse_config({**CONTENT, "evaluate": {"version": "plus", "attacks": ["square"]}})
    with pytest.raises(ConfigError, match=r"did you mean 'standard'"):
        parse_config({**CONTENT, "evaluate": {"version": "standart"}})


def test_l1_runs_without_a_version_have_five_restarts(victim) -> None:
    assert attack_words(parse_config(CONTENT).evaluate.model_dump(mode="json"), "L1") == "AutoAttack"
    model, x, y = victim(n=6)
    budget = AttackBudget(n_iter=3, n_target_classes=1, n_queries=3)
    threats = [ThreatModel("Linf", 0.0001), ThreatModel("L1", 0.1)]
    one, five = (autoattack(model, x, y, threat=each, attacks=["apgd-ce"], budget=budget) for each in threats)
    assert five.n_forward > 4 * one.n_forward


def test_budget_of_one_attack_counts_in_every_version() -> None:
    own = {"apgd-ce": {"n_iter": 2, "n_restarts": 7}, "square": {"n_queries": 3}}
    budget = AttackBudget(n_iter=9, n_target_classes=1, own=own).in_version("standard", "L1")
    assert (budget.of("apgd-ce").n_iter, budget.of("apgd-ce").n_restarts) == (2, 7)
    assert (budget.of("apgd-t").n_iter, budget.of("apgd-t").n_target_classes) == (9, 1)
    assert budget.of("square").n_queries == 3


@pytest.mark.parametrize(
    "changes",
    [{"n_iter": 99}, {"n_iter": 200}, {"n_target_classes": 3}, {"attacks": ["apgd-ce"]}, {"eot": 20}, {"n_queries": 1}],
)
@pytest.mark.parametrize("norm", ["Linf", "L2", "L1"])
def test_autoattack_names_exactly_the_published_settings(norm: str, changes: dict[str, Any]) -> None:
    published = parse_config({**CONTENT, "threat": {"norm": norm, "eps": 0.5}}).evaluate.model_dump(mode="json")
    assert is_autoattack(published, norm)
    assert not is_autoattack({**published, **changes}, norm)
    assert (
        attack_words({**published, "version": "rand", "eot": 20, "attacks": ["apgd-ce", "apgd-dlr"]}, norm)
        == "AutoAttack rand"
    )

"""The benchmark of attacks: one classifier, a mixed classifier, an interrupt and a wrong name."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.benchmarks import attack_benchmark
from mixednuts_dist.cli import main

FACTORY = """
from mixednuts_dist import LogitTransform, MixedClassifier
from mixednuts_dist.classifiers.base_classifiers import load_classifier

def mixture():
    std, rob = load_classifier("demo:std", "std"), load_classifier("demo:rob", "rob")
    return MixedClassifier(std, rob, LogitTransform(1.0, 2.0, 0.0), alpha=0.7)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    budget = AttackBudget(8, 2, 20, border_restarts=0, joint_starts=0)
    monkeypatch.setattr(attack_benchmark, "PUBLISHED_BUDGET", budget)
    (tmp_path / "pair.py").write_text(FACTORY)
    return tmp_path / "pair.py"


@pytest.mark.parametrize("kind", ["classifier", "mixture"])
def test_both_packages_attack_the_same_images(factory: Path, kind: str) -> None:
    model = "demo:rob" if kind == "classifier" else f"py:{factory}:mixture"
    found = attack_benchmark.run(data="digits", model=model, eps=0.1, n_images=12)
    here, there = found["here"], found["pyautoattack"]
    assert list(here["survived"]) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert 12 > here["survived"]["apgd-ce"] >= here["survived"]["square"] == here["robust"] > 0
    assert here["robust"] - there["robust"] == len(here["broken_by_pyautoattack_only"]) - len(here["broken_here_only"])
    assert here["speedup"] == there["seconds"] / here["seconds"]


@pytest.mark.usefixtures("factory")
def test_an_interrupt_prints_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks return what they have by then, which is half of a measurement."""
    verify, n_calls = Verifier.verify, 0

    def interrupted(self: Verifier, *arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 12:
            raise KeyboardInterrupt
        return verify(self, *arguments, **options)

    monkeypatch.setattr(Verifier, "verify", interrupted)
    given = ["--data", "digits", "--model", "demo:rob", "--eps", "0.1", "-n", "12"]
    result = CliRunner().invoke(main, ["benchmark", "attack", *given])
    assert n_calls >= 12
    assert result.exit_code == 130
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "demo:rob", "--eps", "0.1", "--data", "digits:x"], 1, "'x' is too much; valid forms: digits"),
        (["--model", "demo:std"], 1, "needs the radius of its threat model. Add --eps"),
        (["--eps", "abc"], 2, "Invalid value for '--eps': 'abc' is not a number or a fraction"),
    ],
)
def test_a_wrong_value_is_one_line_in_the_names_of_the_command(arguments: list[str], status: int, words: str) -> None:
    result = CliRunner().invoke(main, ["benchmark", "attack", *arguments])
    assert result.exit_code == status
    assert words in " ".join(result.stderr.split())

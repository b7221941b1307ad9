"""Whole AutoAttack beside pyautoattack: one classifier, a mixture, and what is told of a wrong name."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.judge import Judge
from mixednuts_dist.benchmarks import attack
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
    monkeypatch.setattr(attack, "PUBLISHED_BUDGET", AttackBudget(8, 2, 20, border_restarts=0, joint_starts=0))
    (tmp_path / "pair.py").write_text(FACTORY)
    return tmp_path / "pair.py"


def test_one_classifier_is_attacked_by_both(factory: Path) -> None:  # noqa: ARG001 - for the small budget
    found = attack.run_whole(data="digits", model="demo:rob", eps=0.1, n_images=12)
    survived = found["here"]["survived"]
    assert list(survived) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert 12 > survived["apgd-ce"] >= survived["square"] > 0
    assert len(found["here"]["ratios"]) == len(found["pyautoattack"]["seconds"]) == 1
    assert "here with the joint attack" not in found


def test_a_mixture_is_attacked_through_its_surrogate_with_the_joint_attack_and_without(factory: Path) -> None:
    found = attack.run_whole(data="digits", model=f"py:{factory}:mixture", eps=0.1, n_images=12)
    without, joined = found["here"], found["here with the joint attack"]
    assert joined["survived"]["apgd-ce"] == without["survived"]["apgd-ce"] < 12
    assert joined["survived"]["square"] <= without["survived"]["square"]
    # The joint attack's passes come on top of those of the others, but for images that it breaks.
    assert joined["n_backward"] != without["n_backward"]


def test_apgd_takes_the_quick_budget_or_the_published_one(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(attack, "QUICK_BUDGET", AttackBudget(4, 1, border_restarts=0, joint_starts=0))
    passes = []
    for published in (False, True):
        found = attack.run(data="digits", model="demo:rob", eps=0.1, n_images=8, rounds=1, published=published)
        assert (found["iterations"], found["targets"]) == ((8, 2) if published else (4, 1))
        passes.append(found["eager fp32"]["n_backward"])
    assert passes[0] < passes[1]


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize("whole", [["--whole"], []])
def test_an_interrupt_leaves_no_figures(whole: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks return what they have by then, half of a second contestant's work."""
    verdicts, n_calls = Judge.verdicts, 0

    def interrupted(self: Judge, *arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 12:
            raise KeyboardInterrupt
        return verdicts(self, *arguments, **options)

    monkeypatch.setattr(Judge, "verdicts", interrupted)
    given = ["--data", "digits", "--model", "demo:rob", "--eps", "0.1", "-n", "12", "--rounds", "1"]
    result = CliRunner().invoke(main, ["benchmark", "attack", *given, *whole])
    assert n_calls >= 12
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted: nothing of this benchmark is kept\n")
    assert not result.stdout
    assert "times as fast" not in result.stderr


def test_a_wrong_name_is_one_line(factory: Path) -> None:
    given = ["benchmark", "attack", "--whole", "--model", f"py:{factory}:mixture", "--eps", "0.1", "--data", "digits:x"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 1
    assert "digits:x" not in result.stdout
    assert "'x' is too much; valid forms: digits" in result.stderr

"""The benchmark of brackets: nothing certified falls, and what is certified is at most what the attacks leave."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.benchmarks import brackets
from mixednuts_dist.certification.linear_bounds import logit_bounds
from mixednuts_dist.cli import main
from tests.helpers.certified_runs import RELU_NETWORK

SMALL = AttackBudget(n_iter=5, n_target_classes=2, n_queries=20)
ROOT = Path(__file__).parents[2]
REAL = next((place for place in (ROOT / "shared/real", ROOT.parent / "shared/real") if place.is_dir()), ROOT / "none")


def require_no_contradiction(found: dict[str, Any]) -> None:
    assert found["autoattack"]["certified"] > 0
    assert (found["autoattack"]["fell"], found["autoattack"]["undecided"]) == (0, 0)
    for row in found["brackets"]:
        assert row.get("certified and fell", 0) == 0
        assert row["certified"] <= row.get("attacked leaves", row["certified"]) <= found["right"]


def test_smoothing_holds_on_a_few_digits() -> None:
    found = brackets.run(6, draws=500, budget=SMALL)
    require_no_contradiction(found)
    assert [row["alpha"] for row in found["brackets"]] == [1.0, 0.9, 0.8, 0.7]


def test_bounds_hold_on_a_few_digits(tmp_path: Path) -> None:
    (tmp_path / "relu.py").write_text(RELU_NETWORK)
    found = brackets.run(5, model=f"py:{tmp_path / 'relu.py'}:network", eps=0.01, bounds=True, budget=SMALL)
    require_no_contradiction(found)
    assert len(found["brackets"]) == 10  # without M and with the M that was chosen, at the chosen alpha too


def test_an_attack_that_wins_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that forget the radius certify what both attacks break."""
    (tmp_path / "relu.py").write_text(RELU_NETWORK)
    monkeypatch.setattr(brackets, "logit_bounds", lambda model, x, y, _: logit_bounds(model, x, y, 1e-6))
    found = brackets.run(8, model=f"py:{tmp_path / 'relu.py'}:network", eps=0.2, bounds=True, budget=SMALL)
    assert found["autoattack"]["fell"] > 0
    assert any(row["certified and fell"] > 0 for row in found["brackets"])


def test_the_command_takes_a_fraction() -> None:
    refused = CliRunner().invoke(main, ["benchmark", "brackets", "--eps", "2/x"])
    assert refused.exit_code == 2 and "2/x" in refused.stderr
    assert CliRunner().invoke(main, ["benchmark", "certify", "--eps", "2/255"]).exit_code == 2  # takes no radius


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real networks")
def test_bounds_hold_on_cifar() -> None:
    zoo, images = REAL / "zoo.py", REAL / "cifar10_test_first1000.npz"
    found = brackets.run(
        12, f"py:{zoo}:rob_c10_cnn_wide_kw", f"py:{zoo}:std_c10_resnet56", f"npz:{images}", 2 / 255, bounds=True,
        budget=AttackBudget(20, 3, 200),
    )  # fmt: skip
    require_no_contradiction(found)


@pytest.mark.slow
def test_smoothing_holds_on_the_command_line() -> None:
    result = CliRunner().invoke(main, ["benchmark", "brackets", "-n", "40", "--model", "demo:rob", "--eps", "0.1"])
    assert result.exit_code == 0, result.output
    require_no_contradiction(json.loads(result.stdout))

"""Counts next to pyautoattack's, on the digits: versions, single attacks and masked gradients."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import threats
from tests.helpers.real import CIFAR10, ZOO

pytestmark = pytest.mark.filterwarnings("ignore:the gradient of the model is zero")

CIFAR = {"model": f"py:{ZOO}:rob_c10_resnet4b", "data": CIFAR10}
SMALL = {"n_iter": 10, "n_target_classes": 2, "n_queries": 30}


# The difference of both packages' counts on 20 digits at one seed has a standard deviation of 0.7 images for AutoAttack
# in L1 (seeds 0 to 12), and of 1.5 for APGD-T alone (seeds 0 to 23). The bounds are three standard deviations.
SPREAD, SPREAD_ALONE = 0.7, 1.5


def test_threats_prints_counts_and_a_markdown_table() -> None:
    given = ["--threat", "Linf:0.12", "--threat", "L1:1", "--individual", "-n", "20"]
    given += ["--n-iter", "10", "--n-target-classes", "2", "--n-queries", "30"]
    result = CliRunner().invoke(threats.main, given)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["threat"] for row in found["versions"]] == ["Linf, eps = 0.12", "L1, eps = 1"]
    for row in found["versions"]:
        assert 0 < row["here"] < row["clean"] < 20
        assert row["here"] <= row["pyautoattack"] + 3 * SPREAD
        assert row["ratio"] == row["passes per image, here"] / row["passes, pyautoattack"]
    alone = [row["attacks"] for row in found["individual"] if row["threat"] == "L1, eps = 1"]
    assert alone == [*(f"{name} alone" for name in ("apgd-ce", "apgd-t", "fab-t", "square")), "all of standard"]
    for row in found["individual"]:
        assert row["here"] <= row["pyautoattack"] + 3 * SPREAD_ALONE
    assert "| Linf, eps = 0.12 | standard |" in result.stderr


@pytest.mark.soak
@pytest.mark.real
@pytest.mark.parametrize("behind", ["jpeg:0.02", "rounded:32"])
def test_cut_gradients_of_a_real_network_are_passed_too(behind: str) -> None:
    budget = {"n_iter": 20, "n_target_classes": 3, "n_queries": 20}
    rows = threats.run(**CIFAR, behind=behind, threats=["Linf:4/255"], n_images=16, **budget)
    found = {row["attack"]: row for row in rows["masked gradients"]}
    assert found["standard: here, masked"]["robust"] - found["standard: here"]["robust"] >= 4
    assert found["standard: here"]["percent of the drop with handwritten gradients"] >= 90


@pytest.mark.soak
@pytest.mark.real
@pytest.mark.parametrize("threat", ["L1:4", "L2:0.5", "Linf:4/255"])
def test_of_a_real_network_no_more_stands_than_after_the_package(threat: str) -> None:
    budget = {"n_iter": 50, "n_target_classes": 5, "n_queries": 200}
    (row,) = threats.run(**CIFAR, threats=[threat], n_images=20, **budget)["versions"]
    assert 0 < row["here"] <= row["pyautoattack"] < row["clean"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threats": ["L1"]}, r"threat='L1' is not a norm and radius. Write Linf:8/255, L2:0.5 or L1:12"),
        ({"threats": ["Linf:8"]}, r"eps=8.0 exceeds the pixel range"),
        ({"behind": "fog:1"}, r"'fog:1' is not a known defense. Valid: noise:STRENGTH, dropout:STRENGTH"),
        ({"versions": ["plsu"]}, r"version 'plsu' is not known; did you mean 'plus'"),
    ],
)
def test_what_is_no_threat_defense_or_version_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        threats.run(n_images=2, **options)


def test_counts_in_l1_over_several_seeds_equal_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, ours, package = range(13, 17), 0, 0
    for seed in seeds:
        monkeypatch.setattr(threats, "SEEDS", (seed, seed + 1))
        (row,) = threats.run(n_images=20, threats=["L1:1"], **SMALL)["versions"]
        ours, package = ours + row["here"], package + row["pyautoattack"]
    assert abs(ours - package) <= 3 * SPREAD * len(seeds) ** 0.5, (ours, package)


def test_plus_is_beside_the_packages_plus() -> None:
    (row,) = threats.run(n_images=12, threats=["L2:0.8"], versions=["plus"], **SMALL)["versions"]
    assert row["attacks"] == "plus"
    assert 0 < row["here"] <= row["pyautoattack"] < row["clean"]

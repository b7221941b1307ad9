"""A run with a black-box `std` has the parameters of a run with its gradients, and notes what it did not measure."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from tests.helpers.runs import MakeConfig, tiny_content
from tests.helpers.touchy_classifiers import BLACK_BOXES


@pytest.mark.usefixtures("no_pictures")
def test_black_box_std_gives_the_same_parameters(tiny: MakeConfig, tmp_path: Path, local_executor: Any) -> None:
    """The run has no refinement rounds, which follow the gradient of `std`."""
    (tmp_path / "answers.py").write_text(BLACK_BOXES)
    module, black_box = (
        pipeline.run(tiny(name=name, std=uri), executor=local_executor).to_json()
        for name, uri in (("module", "demo:std"), ("box", f"callable:{tmp_path / 'answers.py'}:classes#classes=10"))
    )
    assert black_box["parameters"] == module["parameters"]
    for name in ("std", "rob", "mixed"):
        assert black_box["accuracy"][name]["clean"] == module["accuracy"][name]["clean"]
    assert black_box["accuracy"]["rob"] == module["accuracy"]["rob"]
    std = black_box["accuracy"]["std"]
    assert "black box" in std["attack"]
    assert module["accuracy"]["std"]["robust"]["correct"] <= std["robust"]["correct"] <= std["clean"]["correct"]
    assert any("The standard classifier is a black box" in note for note in black_box["notes"])
    assert not any("black box" in note for note in module["notes"])
    assert black_box["accuracy"]["mixed"]["robust"]["correct"] >= module["accuracy"]["mixed"]["robust"]["correct"] - 2


@pytest.mark.usefixtures("no_pictures")
def test_black_box_rob_gives_the_results_of_its_network(
    tiny: MakeConfig, tmp_path: Path, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square needs no gradients, so a run on the answers equals a run on the network, with a refinement round."""
    monkeypatch.setattr("mixednuts_dist.stages.rounds.ROUND_ATTACKS", ("square",))  # also for the network
    (tmp_path / "answers.py").write_text(BLACK_BOXES)
    rob = f"callable:{tmp_path / 'answers.py'}:logits"
    search = {**tiny_content(tmp_path)["search"], "rounds": 1}
    common = {"attack": {"method": "square", "n_queries": 30}, "search": search}
    evaluate = {**tiny_content(tmp_path)["evaluate"], "attacks": ["square"], "joint_starts": 0}
    found = {
        name: pipeline.run(tiny(name=name, rob=uri, evaluate=evaluate, **common), executor=local_executor).to_json()
        for name, uri in {"network": "demo:rob", "answers": rob}.items()
    }
    assert found["answers"]["accuracy"] == found["network"]["accuracy"]
    assert found["answers"]["parameters"] == found["network"]["parameters"]
    assert any("The robust classifier is a black box" in note for note in found["answers"]["notes"])

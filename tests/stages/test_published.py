"""The published mixed classifier as `rob` of a run without `std`: attacked adaptively, with digits' networks in it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist import pipeline
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.classifiers import robustbench_zoo
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.factories import demo_rob, demo_std
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.deployment.robustbench_submission import export_submission
from mixednuts_dist.errors import ConfigError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.stages.runs import open_run
from tests.helpers.runs import rows

MIXTURE, N_IMAGES = "robustbench:Bai2024MixedNUTS?dataset=cifar10", 24


@pytest.fixture
def digits_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the published mixed classifier are the demo's networks; parameters and code are its own."""
    monkeypatch.setattr(robustbench_zoo, "load_zoo_model", lambda uri: demo_std() if uri.option("part") else demo_rob())


def configured(storage: Path, **evaluate: Any) -> RunConfig:
    return parse_config(
        {
            "name": "published", "data": {"uri": "digits", "n": N_IMAGES}, "rob": MIXTURE, "threat": {"eps": 0.15},
            "precision": "fp32", "partition_size": 8, "storage": str(storage), "compute": {"num_workers": 1},
            "evaluate": {"n_iter": 6, "n_target_classes": 2, "n_queries": 20, **evaluate},
        }
    )  # fmt: skip


@pytest.mark.usefixtures("digits_inside")
@pytest.mark.parametrize(("mode", "joint_starts"), [("transfer", 1), ("transfer", 0), ("bypass", 0)])
def test_run_equals_autoattack_of_the_mixed_classifier(
    mode: Any, joint_starts: int, tmp_path: Path, local_executor: Any
) -> None:
    config = configured(tmp_path, mode=mode, joint_starts=joint_starts)
    results = pipeline.run(config, executor=local_executor, drawn=False)
    mixed = load_classifier(MIXTURE)
    assert isinstance(mixed, MixedClassifier)
    x, y = open_dataset("digits").read(0, N_IMAGES)
    budget = AttackBudget(n_iter=6, n_target_classes=2, n_queries=20, joint_starts=joint_starts)
    alone = autoattack(mixed, x, y, threat=ThreatModel("Linf", 0.15), mode=mode, budget=budget, precision="fp32")
    stored = rows(tmp_path / config.place(), "evaluate", ["robust", "rob_attacked", "x_adv"])
    robust, logits, x_adv = zip(*(stored[i] for i in range(N_IMAGES)), strict=True)
    assert list(robust) == alone.robust.tolist()
    assert torch.equal(torch.tensor(x_adv).reshape(x.shape), alone.x_adv)
    assert torch.equal(torch.tensor(logits), alone.logits)
    assert results.row("rob").attack.startswith("adaptive ")
    assert 0 < results.row("rob").robust.correct < N_IMAGES


@pytest.mark.usefixtures("digits_inside")
def test_rd_of_a_published_mixture_cannot_be_set(tmp_path: Path) -> None:
    """Its own surrogate has r_d = 0.9."""
    assert open_run(configured(tmp_path, rd=0.9)).inputs.mixed
    with pytest.raises(ConfigError, match=r"evaluate\.rd=0\.5 has no effect on rob=.*r_d = 0\.9"):
        open_run(configured(tmp_path, rd=0.5))


@pytest.mark.usefixtures("digits_inside")
def test_robustbench_forms_name_the_attacks_that_ran(tmp_path: Path, local_executor: Any) -> None:
    config = configured(tmp_path, joint_starts=2, mode="bypass")
    pipeline.run(config, executor=local_executor, drawn=False)
    written, _ = export_submission(str(tmp_path / config.place()), tmp_path / "forms")
    form = (tmp_path / "forms" / "new_evaluation.md").read_text()
    assert written == ["x_adv.pt", "new_evaluation.md", "new_model.md"]
    assert "**Model identifier(s):** Bai2024MixedNUTS" in form
    assert "apgd-ce, apgd-t, fab-t, square (6 iterations, 2 targets, 20 queries)" in form
    assert "a joint attack (2 starts)" in form
    assert "mode bypass" in form
    assert "minimum-margin images" not in form

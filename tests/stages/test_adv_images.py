"""Submitted adversarial examples are checked against the ball, the pixel range and the classifiers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from mixednuts_dist import AttackBudget, ThreatModel, autoattack, load_classifier, pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import DatasetError
from mixednuts_dist.images.adv_image_files import read_adv_images
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.stages.stage import stage_of
from tests.helpers.runs import MakeConfig, Watcher, tiny_content

N, EPS = 24, 0.15


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = parse_config(tiny_content(tmp_path_factory.mktemp("verified")))
    pipeline.run(config, executor=DebugExecutor())
    return config


def evaluated(config: RunConfig, *columns: str) -> dict[str, torch.Tensor]:
    return stage_of(config, "evaluate").rows(open_run(config), columns or ("robust", "x_adv", "mixed_clean"))


def verified_images(config: RunConfig, points: Path) -> tuple[Any, dict[str, Any]]:
    asked = parse_config({**config.model_dump(mode="json", exclude_unset=True), "adv_images": {"file": str(points)}})
    assert asked.run_id() == config.run_id()
    stage = stage_of(asked, "adv_images")
    opened = stage.run(asked, executor=DebugExecutor(), progress=Watcher())
    submitted, verified = stage.tables(opened).values()
    return stage.outcomes(opened), {"about": dict(submitted[1]), "verified": {row[0]: row[1:] for row in verified[1]}}


def test_own_adversarial_examples_break_nothing_new(finished: RunConfig, tmp_path: Path) -> None:
    rows = evaluated(finished)
    torch.save({"adv_complete": rows["x_adv"]}, tmp_path / "x_adv.pt")
    outcomes, found = verified_images(finished, tmp_path / "x_adv.pt")
    _, robust_N = outcomes["mixed, submitted images"]
    assert torch.equal(robust_N, rows["robust"])
    clean, broken, new, _ = found["verified"]["mixed"]
    assert broken == int(clean.sum()) - int(rows["robust"].sum())
    assert new == "0"
    assert found["about"]["submitted"] == N
    assert found["about"]["outside the ball"] == 0
    assert 0 < found["about"]["largest distance (Linf)"] <= EPS * (1 + 1e-6)


def test_evaluate_adv_images_prints_a_row_per_classifier(finished: RunConfig, tmp_path: Path) -> None:
    torch.save({"adv_complete": evaluated(finished)["x_adv"]}, tmp_path / "x_adv.pt")
    content = {**finished.model_dump(mode="json", exclude_unset=True), "compute": {"executor": "debug"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    arguments = ["evaluate", str(tmp_path / "tiny.yaml"), "--adv-images", str(tmp_path / "x_adv.pt")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    for line in ("std          24/24", "rob ", "mixed ", "mixednuts run"):
        assert line in done.output


def test_points_outside_the_threat_model_change_no_count(finished: RunConfig, tmp_path: Path) -> None:
    """Two submitted images are too far away, and one is also outside the pixel range."""
    rows = evaluated(finished)
    x, y = open_dataset("digits").read(0, N)
    first, second, third = rows["robust"].nonzero().squeeze(1)[:3].tolist()
    wrong = int((y != y[first]).nonzero()[0])
    points = torch.stack([x[wrong], x[wrong], x[third] + 2])
    np.savez(tmp_path / "some.npz", x_adv=points.numpy(), sample_id=np.array([first, second, third]))
    outcomes, found = verified_images(finished, tmp_path / "some.npz")
    assert torch.equal(outcomes["mixed, submitted images"][1], rows["robust"])
    about = found["about"]
    assert (about["submitted"], about["outside the ball"], about["outside [0, 1]"]) == (3, 2, 1)


def test_adversarial_example_that_breaks_an_image_is_named(tiny: MakeConfig, tmp_path: Path) -> None:
    """One image that a weak evaluation leaves robust is broken by an example of a stronger attack, in the ball."""
    weak = tiny(std=None, attack={"n_iter": 1}, evaluate={"n_iter": 1, "attacks": ["apgd-ce"]})
    results = pipeline.run(weak, executor=DebugExecutor()).to_json()
    robust = evaluated(weak, "robust")["robust"]
    x, y = open_dataset("digits").read(0, N)
    rob, threat, budget = load_classifier("demo:rob", "rob"), ThreatModel("Linf", EPS), AttackBudget(n_iter=40)
    stronger = autoattack(rob, x, y, threat=threat, attacks=["apgd-t"], budget=budget, batch_size=N)
    sample_id = int((robust & ~stronger.robust).nonzero()[0])
    example = stronger.x_adv[sample_id]
    assert float((example - x[sample_id]).abs().max()) <= EPS * (1 + 1e-6)
    np.savez(tmp_path / "one.npz", x_adv=example[None].numpy(), sample_id=np.array([sample_id]))
    outcomes, found = verified_images(weak, tmp_path / "one.npz")
    (_, robust_N), n_robust = outcomes["rob, submitted images"], int(robust.sum())
    assert found["verified"]["rob"][2] == f"1: {sample_id}"
    assert int(robust_N.sum()) == results["accuracy"]["rob"]["robust"]["correct"] - 1 == n_robust - 1


def test_adversarial_images_of_others_are_rejected(tiny: MakeConfig, tmp_path: Path) -> None:
    x, _ = open_dataset("digits").read(0, N)
    np.savez(tmp_path / "beyond.npz", x_adv=x.numpy(), sample_id=np.arange(500, 500 + N))
    config = tiny(std=None, adv_images={"file": str(tmp_path / "beyond.npz")})
    with pytest.raises(DatasetError, match="the sample ids are 500 to 523, and this run has 0 to 23"):
        pipeline.run(config, executor=DebugExecutor())
    assert not list(Path(config.storage).rglob("part-*.parquet")), "the file is checked before any attack"


def test_bad_files_are_refused(tmp_path: Path, tiny: MakeConfig) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(print, protocol=2))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    torch.save(torch.full((2, 1, 8, 8), torch.nan), tmp_path / "nan.pt")
    np.savez(tmp_path / "twice.npz", x_adv=np.zeros((2, 1, 8, 8)), sample_id=np.array([3, 3]))
    np.savez(tmp_path / "other.npz", pixels=np.zeros((2, 1, 8, 8)))
    torch.save(torch.zeros(2, 3, 3), tmp_path / "three.pt")
    for name, words in {
        "evil.pt": "holds no images that can be read",
        "objects.npy": "holds no images that can be read",
        "nan.pt": "some pixels are NaN or infinite",
        "twice.npz": "1 sample ids appear more than once",
        "other.npz": r"it holds \['pixels'\]; name the images x_adv",
        "three.pt": "are not N images",
        "absent.pt": "there is no such file",
    }.items():
        with pytest.raises(DatasetError, match=words):
            read_adv_images(str(tmp_path / name))
    torch.save(torch.zeros(N, 3, 32, 32), tmp_path / "cifar.pt")
    config = tiny(std=None, adv_images={"file": str(tmp_path / "cifar.pt")})
    with pytest.raises(DatasetError, match=r"its images have the shape \(3, 32, 32\), the run's images \(1, 8, 8\)"):
        stage_of(config, "adv_images").run(config, executor=DebugExecutor())

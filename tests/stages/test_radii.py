"""The radii stage: counts never above those of separate runs, fewer passes than these, and refusals before any pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist import AttackBudget, ThreatModel, load_classifier, open_dataset, pipeline
from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.radius_curve import Reference, radius_curve
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.errors import ConfigError, InvalidInputError, ThreatModelError
from mixednuts_dist.stages.radii import Radii
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.stages.stage import stage_of
from mixednuts_dist.storage.tables import read_columns
from mixednuts_dist.studies import study
from tests.helpers.runs import tiny_content

N, ATTACKS, BUDGET = 60, ("apgd-ce", "apgd-t"), AttackBudget(n_iter=15, n_target_classes=3)


@pytest.mark.parametrize(("norm", "radii"), [("Linf", (0.03, 0.06, 0.1, 0.15)), ("L2", (0.2, 0.5, 1.0)),
                                             ("L1", (0.1, 0.4, 0.9))])  # fmt: skip
def test_no_radius_has_a_larger_count_than_a_separate_attack_and_all_together_take_fewer_passes(
    norm: str, radii: tuple[float, ...]
) -> None:
    model, (x, y) = load_classifier("demo:rob", "rob"), open_dataset("digits").read(0, N)
    threats = [ThreatModel(norm, eps) for eps in radii]

    def attacked(threats: list[ThreatModel], reference: Reference | None = None) -> Any:
        return radius_curve(
            model, x, y, threats=threats, attacks=ATTACKS, budget=BUDGET, shape=BatchShape(64), reference=reference
        )

    whole, alone = attacked(threats), [attacked([threat]) for threat in threats]
    counts = whole.robust.sum(dim=0).tolist()
    for place, separate in enumerate(alone):
        assert counts[place] <= int(separate.robust.sum())
    assert counts[0] > counts[-1]
    assert torch.equal(whole.robust, whole.robust.long().cummin(dim=1).values.bool())  # what falls stays down
    assert whole.n_backward < sum(each.n_backward for each in alone)
    known = Reference(1, alone[1].robust[:, 0], x)
    begun = attacked(threats, known)
    assert torch.equal(begun.robust[:, 1], known.robust)
    assert begun.n_backward < whole.n_backward + alone[1].n_backward


def test_a_list_of_radii_is_a_run_at_the_largest_and_a_curve_of_all(tmp_path: Path, local_executor: Any) -> None:
    radii = [0.05, 0.1, 0.15]
    search = {**tiny_content(tmp_path)["search"], "measure": [0.5]}
    config = parse_config(tiny_content(tmp_path / "runs", threat={"eps": radii}, search=search))
    assert config.run_id() == parse_config(tiny_content(tmp_path / "runs", search=search)).run_id()
    results = pipeline.run(config, executor=local_executor)
    opened, stage = open_run(config), stage_of(config, "radii")
    assert isinstance(stage, Radii)
    rows = stage.robust(opened)
    evaluate = stage_of(config, "evaluate").fingerprint(opened)
    stored = read_columns(opened.store, "evaluate", opened.partitions, evaluate, ["robust"])["robust"]
    assert torch.equal(rows["mixed_robust"][:, -1], stored)
    table = results.tables["robust accuracy over the radius, Linf"]
    assert [row[0] for row in table.rows] == ["0", "0.05", "0.1", "0.15"]
    for column in range(1, 4):
        counts = [row[column].correct for row in table.rows]  # type: ignore[union-attr]
        assert counts == sorted(counts, reverse=True)
    assert (Path(opened.store.uri) / "report").exists()
    assert "robust accuracy over the radius" in (Path(opened.store.uri) / "report" / "index.html").read_text()
    (drawn,) = study.run(config, "radius", executor=local_executor).values()
    assert [list(row[1:4]) for row in drawn.table.rows] == [list(row[1:]) for row in table.rows]
    assert list(drawn.table.columns[4:]) == ["mixed, beta = 0.5"]
    clean, *standing = (row[4].correct for row in drawn.table.rows)  # type: ignore[union-attr]
    assert clean >= standing[0] >= standing[1] >= standing[2]
    assert clean >= table.rows[0][3].correct, "a smaller beta asks rob less"  # type: ignore[union-attr]
    assert len(drawn.findings) == 4


def test_a_lost_partition_comes_back_with_the_same_rows(tiny: Callable[..., RunConfig], local_executor: Any) -> None:
    config = tiny(std=None, radii={"eps": [0.1, 0.2]})
    pipeline.run(config, executor=local_executor)
    opened, stage = open_run(config), stage_of(config, "radii")
    assert isinstance(stage, Radii)
    before = stage.robust(opened)
    (Path(opened.store.uri) / "radii" / "part-00001.parquet").unlink()
    stage.run(config, executor=local_executor)
    for name, values in stage.robust(opened).items():
        assert torch.equal(values, before[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threat": {"eps": [0.1, 0.05]}}, "radii must ascend"),
        ({"threat": {"eps": [0.1, 0.1]}}, "radii must ascend"),
        ({"threat": {"eps": [0, 0.1]}}, "radii must be positive"),
        ({"threat": {"eps": [0.1, 0.2]}, "radii": {"eps": [0.3]}}, "give one radius or leave `radii` out"),
    ],
)
def test_bad_radii_are_refused_with_the_next_step(
    tiny: Callable[..., RunConfig], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_a_random_classifier_is_refused_before_any_pass(tiny: Callable[..., RunConfig]) -> None:
    config = tiny(radii={"eps": [0.1]}, evaluate={"eot": 2, "attacks": ["apgd-ce"]})
    with pytest.raises(InvalidInputError, match=r"radii: evaluate\.eot=2 admits a random classifier"):
        pipeline.run(config)


def test_a_radius_that_the_norm_has_not_is_refused_before_any_pass(tiny: Callable[..., RunConfig]) -> None:
    config = tiny(radii={"eps": [0.1, 8.0]})
    with pytest.raises(ThreatModelError, match=r"8/255"):
        pipeline.run(config)
    assert not (Path(config.storage) / config.run_id() / "attack").exists()

"""A whole run on a real local Ray: what it leaves, what a second one does, and what a damaged one repairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mixednuts_dist import pipeline
from mixednuts_dist.cli.status import run_status
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.errors import ContentHashMismatch, InvalidInputError, MissingArtifact
from mixednuts_dist.stages import attack, evaluate, search
from mixednuts_dist.storage.index import finished_files
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.store import Store
from tests.helpers.runs import ATTACK, EVALUATE, MakeConfig, NoRay, Watcher, rows, rows_in


def test_the_run_leaves_what_the_design_says(tiny_run) -> None:
    _, folder, _ = tiny_run
    for name in ("run.yaml", "search/selected.json", "search/candidates.parquet", "report/index.html"):
        assert (folder / name).stat().st_size > 0
    for stage in ("attack", "evaluate"):
        assert sorted(path.name for path in rows_in(folder, stage).glob("*.parquet")) == [
            f"part-{i:05d}.parquet" for i in range(3)
        ]
    assert not list(folder.rglob("*.tmp-*"))
    assert not (folder / "errors").exists()


def test_results_json_counts_the_rows(tiny_run) -> None:
    _, folder, content = tiny_run
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    attacked, evaluated = rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)
    robust = sum(row[EVALUATE.index("robust")] for row in evaluated.values())
    clean = sum(np.argmax(row[EVALUATE.index("mixed_clean")]) == row[0] for row in evaluated.values())
    mixed = content["accuracy"]["mixed"]
    assert (mixed["robust"]["correct"], mixed["clean"]["correct"]) == (robust, clean)
    rob = content["accuracy"]["rob"]
    assert rob["robust"]["correct"] == sum(not row[ATTACK.index("rob_broken")] for row in attacked.values())
    for row in content["accuracy"].values():
        for kind in ("clean", "robust"):
            assert set(row[kind]) >= {"correct", "total", "percent", "low", "high"}
            assert row[kind]["low"] <= row[kind]["percent"] <= row[kind]["high"]
    assert set(content["parameters"]) >= {"s", "p", "c", "alpha", "one_minus_alpha", "beta"}
    assert set(content["seconds"]) == {"attack", "search", "evaluate"}
    assert all(seconds > 0 for seconds in content["seconds"].values())


def test_the_prediction_equals_the_measured_clean_accuracy(tiny_run) -> None:
    content = tiny_run[2]
    predicted = {point["beta"]: point for point in content["tradeoff"]["predicted"]}[content["parameters"]["beta"]]
    assert predicted["clean"]["correct"] == content["accuracy"]["mixed"]["clean"]["correct"]


def test_run_yaml_says_what_was_run(tiny_run) -> None:
    config, folder, _ = tiny_run
    content = yaml.safe_load((folder / "run.yaml").read_text())
    assert content["run_id"] == config.run_id() == folder.name
    assert parse_config(content["config"]) == config
    assert set(content["inputs"]["checksums"]) == {"data", "labels", "std", "rob"}


def test_summaries_name_rows_and_precision(tiny_run) -> None:
    store = Store(str(tiny_run[1].parents[1]))
    hashes = {stage: store.names(stage)[0] for stage in ("attack", "evaluate")}
    found = [finished_files(store, stage, split_images(24, 8), hashes[stage]) for stage in hashes]
    summaries = [summary for each in found for summary in each.values()]
    assert len(summaries) == 6
    assert all(each.device and each.precision for each in summaries)
    assert all(each.rows == each.float32_rows > 0 and each.repeatable for each in summaries)


@pytest.mark.usefixtures("no_pictures")
def test_a_second_run_does_nothing_and_says_so(tiny_run) -> None:
    config, folder, content = tiny_run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("part-*.parquet")}
    watcher = Watcher()
    again = pipeline.run(config, executor=NoRay(), progress=watcher).to_json()
    assert again == content
    assert watcher.computed == []
    assert all("nothing to do" in watcher.messages[stage] for stage in ("attack", "search", "evaluate"))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("part-*.parquet")} == before


@pytest.mark.parametrize("partition_size", [24, 2])
def test_the_partitioning_and_the_workers_do_not_move_a_row(
    tiny_run, tiny: MakeConfig, local_executor: Any, partition_size: int
) -> None:
    """Against partitions of 8 and two workers of Ray."""
    config = tiny(partition_size=partition_size, compute={"num_workers": 1, "batch_size": 5})
    for stage in (attack, search, evaluate):
        stage.run(config, executor=local_executor)
    folder = Path(config.storage) / config.place()
    for name, columns in (("attack", ATTACK), ("evaluate", EVALUATE)):
        mine, theirs = rows(folder, name, columns), rows(tiny_run[1], name, columns)
        assert mine.keys() == theirs.keys()
        for sample_id, row in mine.items():
            for column, a, b in zip(columns, row, theirs[sample_id], strict=True):
                assert np.allclose(a, b, atol=2e-4), f"{name} {sample_id} {column}"


def test_another_beta_shares_the_attack(copied_run, local_executor: Any) -> None:
    config, folder, _ = copied_run
    other = config.with_changes(search=config.search.with_changes(beta=0.5))
    assert other.run_id() != config.run_id()
    before = {path: path.stat().st_mtime_ns for path in rows_in(folder, "attack").iterdir()}
    result = search.run(other, executor=local_executor)
    assert result.deployed().beta == 0.5
    assert {path: path.stat().st_mtime_ns for path in rows_in(folder, "attack").iterdir()} == before
    names = {path.name for path in (Path(other.storage) / other.place()).iterdir()}
    assert names == {"run.yaml", "search", "seconds.json"}


def test_status_reads_the_storage_alone(tiny_run) -> None:
    config, _, content = tiny_run
    status = run_status(config)
    done = {stage.stage: (stage.partitions_done, stage.partitions) for stage in status.stages}
    assert done == {"attack": (3, 3), "evaluate": (3, 3)}
    assert status.stages[1].robust == content["accuracy"]["mixed"]["robust"]["correct"]
    assert status.searched
    assert status.failed == ()


def test_stages_out_of_order_say_what_to_run_first(tiny: MakeConfig) -> None:
    config = tiny()
    assert not run_status(config).started
    with pytest.raises(MissingArtifact, match=r"0 of 3 partitions .*missing: 0, 1, 2\. Run: mixednuts attack"):
        search.run(config, executor=NoRay())
    done = {stage.stage: (stage.partitions_done, stage.partitions) for stage in run_status(config).stages}
    assert done == {"attack": (0, 3), "evaluate": (0, 3)}
    with pytest.raises(MissingArtifact, match="Run: mixednuts attack"):
        evaluate.run(config, executor=NoRay())


def test_run_rejects_inputs_that_have_changed(copied_run) -> None:
    """The rows were computed with the weights whose checksum `run.yaml` has."""
    content = yaml.safe_load((copied_run.folder / "run.yaml").read_text())
    content["inputs"]["checksums"]["rob"] = 64 * "0"
    (copied_run.folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    for stage in (attack, search):
        with pytest.raises(ContentHashMismatch, match=r"rob was 0{12} and is \w+.*stored rows belong to other inputs"):
            stage.run(copied_run.config, executor=NoRay())


def test_search_rejects_a_rob_without_robust_images(tiny: MakeConfig, local_executor: Any) -> None:
    config = tiny(threat={"eps": 0.9}, data={"uri": "digits", "n": 8})
    attack.run(config, executor=local_executor)
    with pytest.raises(InvalidInputError, match="no attacked image is classified correctly by `rob`"):
        search.run(config, executor=NoRay())

"""A run folder that the previous release wrote (schema 2: its main pipeline on 24 digits) is read as it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from mixednuts_dist import MixedClassifier
from mixednuts_dist.cli import main
from mixednuts_dist.cli.options import config_of
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.errors import ConfigError
from mixednuts_dist.stages import attack
from mixednuts_dist.storage.manifest import ManifestWriter, finished_files, verify
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.records import SearchResult
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_attack_records, read_evaluate_records, read_footer, read_rows

FOLDER = Path(__file__).parents[1] / "fixtures" / "run_of_schema_2"
FOLDER_NAME = "tiny-0bf9a584"
ATTACKS = ["cached", "apgd-ce", "apgd-t", "fab-t", "square"]
PARTS = split_images(24, 8)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    shutil.copytree(FOLDER, tmp_path / "run")
    return Store(str(tmp_path / "run"))


def fingerprint(store: Store, stage: str) -> str:
    footer = read_footer(store, f"{stage}/{PARTS[0].file_name}")
    assert footer is not None
    assert footer.schema_version == 2
    return footer.fingerprint


def test_rows_and_receipts_give_the_results_that_it_reported(store: Store) -> None:
    stored = json.loads(store.read("report/results.json"))["accuracy"]
    assert fingerprint(store, "attack") == yaml.safe_load(store.read("run.yaml"))["attack_fingerprint"]
    attack = read_attack_records(store, PARTS, fingerprint(store, "attack"))
    evaluate = read_evaluate_records(store, PARTS, fingerprint(store, "evaluate"), ATTACKS)
    assert torch.equal(attack.sample_ids_N, torch.arange(24))
    clean = (attack.rob_clean_NK.argmax(dim=1) == attack.labels_N).sum()
    assert (int(clean), int((~attack.rob_broken_N).sum())) == tuple(
        stored["rob"][kind]["correct"] for kind in ("clean", "robust")
    )
    assert int(evaluate.robust_N.sum()) == stored["mixed"]["robust"]["correct"]
    receipts = finished_files(store, "evaluate", PARTS, fingerprint(store, "evaluate"))
    assert sum(receipt.robust for receipt in receipts.values()) == stored["mixed"]["robust"]["correct"]
    images = read_rows(store, "evaluate", PARTS[1], fingerprint(store, "evaluate"), "x_adv", [9, 8])
    assert images.shape == (2, 1, 8, 8)


def test_its_selected_parameters_are_read(store: Store) -> None:
    result = SearchResult.from_json(json.loads(store.read("search/selected.json"))["result"])
    assert (result.deployed().beta, result.deployed().scale, result.criterion) == (0.9, 5.0, "exact")


def test_reading_changes_nothing_and_a_stage_adds_the_manifest(store: Store) -> None:
    before = store.all_files()
    found = finished_files(store, "attack", PARTS, fingerprint(store, "attack"))
    assert verify(store) == ([], len(before))
    assert store.all_files() == before
    assert all((FOLDER / path).read_bytes() == store.read(path) for path in before)
    ManifestWriter(store, "attack", fingerprint(store, "attack"), found).flush()
    assert len(store.names("attack/manifest")) == 1


def test_commands_name_the_release_of_a_run_that_they_cannot_go_on_from_and_what_reads_it(
    store: Store, tmp_path: Path
) -> None:
    """`from_run` and `verify` read it; a report of today's rows would not be its report."""
    folder = Path(store.uri).rename(tmp_path / FOLDER_NAME)
    with pytest.raises(ConfigError, match=r"release 0\.1\.0 made it, .*results\.json.*from_run reads it.*install"):
        config_of(str(folder))
    ended = CliRunner().invoke(main, ["compare", str(folder), str(folder)])
    assert "release 0.1.0 made it" in ended.stderr
    assert "delete" not in ended.stderr
    assert MixedClassifier.from_run(str(folder)).alpha < 1


def test_a_run_beside_one_of_another_release_says_why_it_begins_anew(
    store: Store, tiny: Callable[..., RunConfig], local_executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny()
    Path(config.storage).mkdir()
    before = Path(store.uri).rename(Path(config.storage) / FOLDER_NAME)
    content = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    attack.run(config, executor=local_executor)
    assert f"{FOLDER_NAME} is of release 0.1.0, whose rows are others: this run begins anew" in caplog.text
    assert {path: path.read_bytes() for path in before.rglob("*") if path.is_file()} == content

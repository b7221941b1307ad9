"""Runs compared image by image, and all runs of a storage in one table."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.cli.status import storage_runs
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.errors import InvalidInputError, MissingArtifact
from mixednuts_dist.reports import comparison
from mixednuts_dist.stages.runs import stored_run
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_columns
from tests.helpers.runs import Finished, rows_in, tiny_content


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> tuple[Path, Path]:
    """A mixed classifier and its `rob` alone, on the same images."""
    storage, folders = tmp_path_factory.mktemp("two"), []
    for changes in ({}, {"std": None, "name": "alone"}):
        config = parse_config(tiny_content(storage, **changes))
        pipeline.run(config, executor=local_executor)
        folders.append(storage / config.place())
    return folders[0], folders[1]


@pytest.mark.parametrize(("b", "c"), [(0, 0), (5, 5), (6, 0), (1, 9), (30, 12), (400, 520)])
def test_mcnemar_is_the_binomial_test_of_the_images_that_differ(b: int, c: int) -> None:
    n, fewer = b + c, min(b, c)
    tail = sum(math.comb(n, i) for i in range(fewer + 1))
    assert comparison.exact_mcnemar(b, c) == pytest.approx(min(1.0, 2 * tail / 2**n), rel=1e-9)
    assert comparison.exact_mcnemar(b, c) == comparison.exact_mcnemar(c, b)


def test_holm_is_monotone_and_the_smallest_is_multiplied_by_all() -> None:
    assert comparison.holm([0.02, 0.5, 0.01]) == [0.04, 0.5, 0.03]
    assert comparison.holm([0.4, 0.4]) == [0.8, 0.8]


def test_pairs_count_the_stored_rows(two_runs: tuple[Path, Path]) -> None:
    shown = CliRunner().invoke(main, ["compare", *map(str, two_runs), "--json"])
    assert shown.exit_code == 0, shown.output
    pairs = {pair["what"]: pair for pair in json.loads(shown.output)["pairs"]}
    robust = []
    for folder, clean in zip(two_runs, ("mixed_clean", "rob_clean"), strict=True):
        run = stored_run(Store(str(folder)))
        content_hash = rows_in(folder, "evaluate").name
        rows = read_columns(run.rows, "evaluate", run.partitions, content_hash, ["label", clean, "robust"])
        robust.append(rows["robust"].tolist())
    kinds = ("both", "only_first", "only_second", "neither")
    for (mine, other), name in zip(product((True, False), repeat=2), kinds, strict=True):
        assert pairs["robust"][name] == list(zip(*robust, strict=True)).count((mine, other))
    assert sum(pairs["clean"][name] for name in kinds) == 24
    text = CliRunner().invoke(main, ["compare", *map(str, two_runs)]).output
    assert "McNemar" in text


def test_what_cannot_be_compared_is_refused_with_the_reason(two_runs: tuple[Path, Path]) -> None:
    run = stored_run(Store(str(two_runs[0])))
    with pytest.raises(InvalidInputError, match="two runs or more"):
        comparison.compare([run])
    other = replace(run, inputs=replace(run.inputs, n_images=12, checksums={**run.inputs.checksums, "data": "0"}))
    with pytest.raises(InvalidInputError, match=r"24 images of digits.*12 of digits.*not about the same images"):
        comparison.compare([run, other])
    harder = replace(run, config=run.config.with_changes(threat={"eps": 0.3}))
    with pytest.raises(InvalidInputError, match="have different threat models"):
        comparison.compare([run, harder])


def test_all_runs_of_a_storage_stand_in_one_table(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    storage = two_runs[0].parents[2]
    found = storage_runs(str(storage))
    assert {row["run"] for row in found} == {folder.name for folder in two_runs}
    assert found[0]["finished"] >= found[1]["finished"]
    mixed = next(row for row in found if row["run"] == two_runs[0].name)
    results = json.loads((two_runs[0] / "report/results.json").read_text())
    assert mixed["clean"].correct == results["accuracy"]["mixed"]["clean"]["correct"]
    assert (mixed["beta"], mixed["state"]) == (0.9, "reported")
    assert mixed["core_hours"] > 0
    listed = json.loads(CliRunner().invoke(main, ["status", str(storage), "--json"]).output)["runs"]
    assert [(row["run"], row["clean"]["correct"]) for row in listed] == [
        (row["run"], row["clean"].correct) for row in found
    ]
    assert "reported" in CliRunner().invoke(main, ["status", str(storage)]).output
    with pytest.raises(MissingArtifact, match="there is no run under"):
        storage_runs(str(tmp_path))


def test_an_unreadable_and_an_unfinished_run_are_listed_as_such(copied_run: Finished) -> None:
    _, folder, _ = copied_run
    for path in rows_in(folder, "evaluate").glob("part-0000[12].parquet"):
        path.unlink()
    (folder / "report/results.json").unlink()  # an unfinished run has only the page
    (folder.parent / "broken-1234").mkdir()
    (folder.parent / "broken-1234" / "run.yaml").write_text("name: [")
    found = {row["run"]: row["state"] for row in storage_runs(str(folder.parents[2]))}
    assert found[folder.name] == "evaluate 1/3"
    assert found["broken-1234"].startswith("unreadable: ")

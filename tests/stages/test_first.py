"""`search.first`: the attack, the search and its rounds see the first images only, and the evaluation sees all."""

import csv
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.cli.status import run_status, storage_runs
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.stages.runs import reopen_run
from mixednuts_dist.stages.search_result import read_search_result
from mixednuts_dist.stages.stage import stage_of
from tests.helpers.runs import rows_in, tiny_content

N_FIRST, N_ALL = 12, 24  # partitions hold 8 images
ROUNDS = {"rounds": 1, "first": N_FIRST}
Finished = tuple[RunConfig, RunResults]


def configured(storage: Path, n: int = N_ALL, **search: Any) -> RunConfig:
    content = tiny_content(storage, data={"uri": "digits", "n": n}, attack={"n_iter": 4, "n_target_classes": 1})
    return parse_config({**content, "search": {**content["search"], **search}})


def parts(folder: Path, stage: str) -> list[str]:
    return sorted(path.name for path in rows_in(folder, stage).glob("part-*.parquet"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Finished:
    config = configured(tmp_path_factory.mktemp("first"), **ROUNDS)
    return config, pipeline.run(config, executor=local_executor)


def test_only_the_evaluation_covers_all_images(finished: Finished) -> None:
    config, results = finished
    folder = Path(config.storage) / config.place()
    assert parts(folder, "attack") == parts(folder, "search/round-1") == ["part-00000.parquet", "part-00001.parquet"]
    assert len(parts(folder, "evaluate")) == 3
    ids = reopen_run(config).sample_ids
    assert ids is not None and ids.tolist() == list(range(N_FIRST))
    assert {entry.total for entry in results.search.entries} == {N_FIRST}
    done = {stage.stage: (stage.partitions_done, stage.partitions) for stage in run_status(config).stages}
    assert done == {"attack": (2, 2), "evaluate": (3, 3)}


def test_status_counts_the_partitions_of_the_first_images(tmp_path: Path, local_executor: Any) -> None:
    every, config = configured(tmp_path), configured(tmp_path, first=N_FIRST)
    for each in (every, config):  # both use the same rows of the attack
        stage_of(each, "attack").run(each, executor=local_executor)
    states = {row["run"]: row["state"] for row in storage_runs(str(tmp_path))}
    assert states == {every.run_id(): "attack 3/3", config.run_id(): "attack 2/2"}
    (attack,) = (stage for stage in run_status(config).stages if stage.stage == "attack")
    assert (attack.partitions_done, attack.partitions) == (2, 2)


def test_report_separates_seen_from_unseen(finished: Finished) -> None:
    _, results = finished
    totals = {row.classifier: row.clean.total for row in (*results.accuracy, *results.stages)}
    n_unseen = N_ALL - N_FIRST
    assert totals == {"std": N_FIRST, "rob": N_FIRST, "mixed": N_ALL, "mixed, seen": N_FIRST, "mixed, unseen": n_unseen}
    mixed, (seen, unseen) = results.row("mixed"), results.stages
    assert mixed.clean.correct == seen.clean.correct + unseen.clean.correct
    assert mixed.robust.correct == seen.robust.correct + unseen.robust.correct
    assert seen.clean.correct == results.parameters.clean_correct
    assert results.kept is not None and results.kept.total == results.row("rob").robust.correct
    assert results.survival[-1].correct == mixed.robust.correct


def test_warm_start_table_lists_the_images_that_it_broke(finished: Finished) -> None:
    config, results = finished
    report = Path(config.storage) / config.place() / "report"
    found = list(csv.DictReader((report / "warm_start.csv").read_text().splitlines()))
    (step,) = (step for step in results.survival if step.step == "warm-start")
    assert len(found) == step.lost > 0
    assert all(row["label"] != row["predicted"] for row in found)
    assert {int(row["sample_id"]) for row in found} <= set(range(16)), "the attack stage took two partitions of 8"


def test_search_equals_that_of_a_run_on_those_images(finished: Finished, tmp_path: Path, local_executor: Any) -> None:
    config = configured(tmp_path, n=N_FIRST, rounds=1)
    pipeline.run(config, executor=local_executor)
    mine, theirs = (read_search_result(reopen_run(each)) for each in (finished[0], config))
    assert mine.entries == theirs.entries
    assert [done.kept for done in mine.rounds] == [done.kept for done in theirs.rounds]


def test_content_hashes_follow_the_key_only_where_rows_depend_on_it(tmp_path: Path) -> None:
    plain, first = configured(tmp_path), configured(tmp_path, first=N_FIRST)
    assert "first" not in plain.determinants()["search"]
    assert first.attack_determinants() == plain.attack_determinants()
    assert first.run_id() != plain.run_id()

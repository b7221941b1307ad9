"""The search stage on the logits of one real attack."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.mixing.mixture import mixed_classes
from mixednuts_dist.stages import attack, search
from mixednuts_dist.stages.runs import reopen_run
from mixednuts_dist.storage.records import SearchResult
from mixednuts_dist.storage.tables import read_attack_records
from tests.helpers.runs import MakeConfig, tiny_content

RENAMED = """
from mixednuts_dist.config.register import CRITERIA
from mixednuts_dist.selection.criteria import ExactCriterion

@CRITERIA("clean-images", describes="exact under another name")
class Renamed(ExactCriterion):
    name = "clean-images"
"""


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> MakeConfig:
    """A factory of configurations that share one attack, which has been run."""
    content = tiny_content(
        tmp_path_factory.mktemp("search"), data={"uri": "digits", "n": 16}, attack={"n_iter": 3, "n_target_classes": 1}
    )

    def config(**changes: Any) -> RunConfig:
        return parse_config({**content, "search": {**content["search"], **changes}})

    attack.run(config(), executor=local_executor)
    return config


def candidates(config: RunConfig) -> list[dict[str, Any]]:
    file = Path(config.storage) / config.place() / "search" / "candidates.parquet"
    return list(pq.read_table(file).to_pylist())


def assert_best(result: SearchResult, rows: list[dict[str, Any]]) -> None:
    """Every entry is a usable row, and none at its beta is better."""
    for entry in result.entries:
        usable = [row for row in rows if row["beta"] == entry.beta and row["feasible"] and row["deployable"]]
        own = [row for row in usable if all(row[key] == getattr(entry, key) for key in ("scale", "power", "bias"))]
        assert any(row["clamp"] == entry.clamp and row["ln_k"] == entry.ln_k for row in own)
        assert entry.objective == max(row["objective"] for row in usable)


def test_every_candidate_is_recorded(configured: MakeConfig, local_executor: Any) -> None:
    config = configured(clamp="relu")
    result, rows = search.run(config, executor=local_executor), candidates(config)
    assert {(row["clamp"], row["ln_k"]) for row in rows} == {("relu", None)}
    assert len(rows) == result.n_candidates * 3 == 8 * 3
    assert_best(result, rows)
    shown = search.read_candidates(reopen_run(config), config.search.beta)
    assert shown == [row for row in rows if row["beta"] == config.search.beta]


def test_renamed_criterion_gives_the_same_search(tmp_path: Path, local_executor: Any) -> None:
    (tmp_path / "renamed.py").write_text(RENAMED)
    content = tiny_content(
        tmp_path, data={"uri": "digits", "n": 16}, attack={"n_iter": 3, "n_target_classes": 1},
        extensions=[str(tmp_path / "renamed.py")],
    )  # fmt: skip
    found, rows = [], []
    for criterion in ("exact", "clean-images"):
        config = parse_config({**content, "search": {**content["search"], "criterion": criterion, "rounds": 1}})
        attack.run(config, executor=local_executor)
        found.append(search.run(config, executor=local_executor))
        rows.append(candidates(config))
    assert rows[0] == rows[1]
    assert found[0].rounds
    assert found[1] == replace(found[0], criterion="clean-images")


def test_a_sample_of_the_images_is_searched_where_asked_for(configured: MakeConfig, local_executor: Any) -> None:
    """Rounds included, which attack no other image: the search reads the same sample of every table."""
    config = configured(sample=12, rounds=1)
    result = search.run(config, executor=local_executor)
    opened = reopen_run(config)
    sample = opened.sample_ids
    assert sample is not None and sorted(set(sample.tolist())) == sample.tolist() and len(sample) == 12
    assert {entry.total for entry in result.entries} == {12}
    assert any(note.startswith("The search read 12 of the 16 images") for note in result.notes)
    rows = read_attack_records(opened.rows, opened.partitions, opened.attack_content_hash, sample_ids=sample)
    chosen = result.deployed()
    right = mixed_classes(rows.rob_clean_NK, rows.std_clean_NK.argmax(dim=1), chosen.mixture()) == rows.labels_N
    assert int(right.sum()) == chosen.clean_correct
    assert {done.of for done in result.rounds} == {int((~rows.rob_broken_N).sum())}
    tried_N = opened.columns("search/round-1", result.rounds[0].content_hash, ["tried_0"])["tried_0"]
    assert 0 < int(tried_N.sum()) == int(tried_N[sample].sum())


def test_only_the_default_grid_widens_itself_and_says_how_far(configured: MakeConfig, local_executor: Any) -> None:
    content = configured().model_dump(mode="json")
    content["search"] = {"beta": 0.9, "betas": [0.9], "rounds": 0}
    config = parse_config(content)
    assert config.search.widen == 16 and configured().search.widen == 0
    assert parse_config({**content, "search": {**content["search"], "widen": 0}}).run_id() != config.run_id()
    attack.run(config, executor=local_executor)
    result = search.run(config, executor=local_executor)
    rows, (note,) = candidates(config), [note for note in result.notes if "was widened" in note]
    assert len(rows) == result.n_candidates > 512
    assert f"{max(row['power'] for row in rows):.3g}" in note and "search.widen: 0" in note
    assert_best(result, rows)
    plain = parse_config({**content, "search": {**content["search"], "widen": 0}})
    attack.run(plain, executor=local_executor)
    narrow = search.run(plain, executor=local_executor)
    assert narrow.n_candidates == 512 and narrow.deployed().on_grid_edge
    assert any("; widen search." in note for note in narrow.notes)
    assert result.deployed().clean_correct >= narrow.deployed().clean_correct

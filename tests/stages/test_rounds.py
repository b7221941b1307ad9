"""Beta that holds when measured: the search attacks its own choice and chooses again with what it found."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.cli.status import run_status
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.selection.grid import kept_images
from mixednuts_dist.stages import attack, evaluate, search
from mixednuts_dist.stages.choosing import wanted_images
from mixednuts_dist.stages.runs import reopen_run
from mixednuts_dist.stages.search_result import evaluate_content_hash
from mixednuts_dist.storage.records import PartitionSummary, SearchResult
from tests.helpers.runs import Watcher, tiny_content

N_IMAGES = 32
Searched = tuple[RunConfig, SearchResult]
WIDE = {
    "beta": 0.9,
    "betas": [1.0, 0.9, 0.5],
    "scales": {"min": 0.05, "max": 5, "count": 8, "spacing": "log"},
    "powers": {"min": 1, "max": 4, "count": 7},
    "biases": {"min": -1, "max": 0, "count": 5},
    "rounds": 3,
}


class LooksAtStatus(Watcher):
    """Also calls `mixednuts status` whenever a partition is finished."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._config = config
        self.seen: set[tuple[str, int, int]] = set()

    def partition_done(self, summary: PartitionSummary) -> None:
        super().partition_done(summary)
        *_, last = run_status(self._config).stages
        self.seen.add((last.stage, last.partitions_done, last.partitions))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Searched:
    content = tiny_content(tmp_path_factory.mktemp("rounds"), search=WIDE, data={"uri": "digits", "n": N_IMAGES})
    config = parse_config({**content, "partition_size": 16})
    attack.run(config, executor=local_executor)
    return config, search.run(config, executor=local_executor)


def test_last_choice_keeps_beta_under_attack(searched: Searched) -> None:
    _, result = searched
    last = next(done for done in reversed(result.rounds) if done.attacked == (result.deployed(),))
    assert last.kept[0] >= kept_images(0.9, last.of)


@pytest.mark.parametrize("deployed", [0.8, 0.99])
def test_returning_choice_is_not_attacked_again(
    deployed: float, searched: Searched, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large beta may ask for more images than `rob` keeps."""

    def wanted(beta: float, n_robust: int) -> int:
        return n_robust + 1 if beta == 0.99 else wanted_images(beta, n_robust)

    monkeypatch.setattr("mixednuts_dist.stages.rounds.wanted_images", wanted)
    config = searched[0]
    target = config.search.with_changes(beta=deployed, measure=(0.99,), rounds=6)
    found = search.run(config.with_changes(search=target), executor=local_executor)
    mixtures = [str(entry.mixture()) for done in found.rounds for entry in done.attacked if entry.beta == 0.99]
    assert 1 <= len(set(mixtures)) == len(mixtures) < 6


def test_unchanged_choice_is_not_evaluated_again(
    tmp_path: Path, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is made to report that it keeps none of ten images."""
    config = parse_config(tiny_content(tmp_path, search={**WIDE, "rounds": 1}))
    monkeypatch.setattr(search, "kept_by_evaluation", lambda *_: (0, 10))
    watcher = Watcher()
    evaluated_to_the_end(config, local_executor, watcher)
    evaluated, learnt = (
        [each for each, _ in watcher.computed].count(stage) for stage in ("evaluate", "search/round-2")
    )
    assert evaluated == learnt == len(reopen_run(config).partitions)


def test_evaluation_starts_from_the_examples_of_rounds(searched: Searched, local_executor: Any) -> None:
    config, result = searched
    opened = evaluate.run(config, executor=local_executor)
    evaluated = evaluate_content_hash(opened, result)
    robust_N, cached_N = opened.columns("evaluate", evaluated, ["robust", "survived_warm-start"]).values()
    last = f"search/round-{len(result.rounds)}", result.rounds[-1].content_hash
    (broken_N,) = opened.columns(*last, ["broken_0"]).values()
    assert not (robust_N & broken_N).any()
    assert not (cached_N & broken_N).any()  # what a round has found is tried before anything else


def test_another_run_reuses_the_rows_of_rounds(searched: Searched, local_executor: Any) -> None:
    config, first = searched
    other = config.with_changes(search=config.search.with_changes(betas=(1.0, 0.9)))
    assert other.run_id() != config.run_id()
    watcher = Watcher()
    again = search.run(other, executor=local_executor, progress=watcher)
    assert watcher.computed == []
    assert again.rounds == first.rounds
    assert again.deployed() == first.deployed()


def test_a_round_that_lost_a_partition_computes_that_one_again(searched: Searched, local_executor: Any) -> None:
    config, result = searched
    folder = Path(config.storage) / config.place() / "search"
    (folder / "selected.json").unlink()
    (folder.parents[2] / "search/round-1" / result.rounds[0].content_hash / "part-00001.parquet").unlink()
    watcher = LooksAtStatus(config)
    again = search.run(config, executor=local_executor, progress=watcher)
    assert again.entries == result.entries
    assert {stage for stage, _ in watcher.computed} == {"search/round-1"}
    assert watcher.seen == {("search/round-1", 2, 2)}
    assert [stage.stage for stage in run_status(config).stages] == ["attack", "evaluate"]


def evaluated_to_the_end(config: RunConfig, executor: Any, progress: Watcher) -> None:
    """All stages but the report."""
    attack.run(config, executor=executor, progress=progress)
    search.run(config, executor=executor, progress=progress)
    opened = evaluate.run(config, executor=executor, progress=progress)
    while search.learn(opened, executor, progress):
        evaluate.run(config, executor=executor, progress=progress)


def test_low_evaluation_starts_one_more_round(
    tmp_path: Path, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds without an attack only measure `std` at the attack stage's examples."""
    monkeypatch.setattr("mixednuts_dist.stages.rounds.ROUND_ATTACKS", ())
    content = tiny_content(
        tmp_path, search={**WIDE, "rounds": 1}, data={"uri": "digits", "n": N_IMAGES},
        evaluate={"n_iter": 20, "n_target_classes": 4, "n_queries": 20},
    )  # fmt: skip
    config = parse_config({**content, "partition_size": 16})
    evaluated_to_the_end(config, local_executor, Watcher())
    opened = reopen_run(config)
    result = search.read_search_result(opened)
    assert any(done.evaluated for done in result.rounds)
    before = [choice for done in result.rounds for choice in done.attacked]
    kept, _ = search.kept_by_evaluation(opened, result)
    first = next(done for done in result.rounds if done.evaluated)
    assert first.kept[0] < kept_images(0.9, first.of)
    assert kept >= first.kept[0]
    assert before[0].mixture().settings() != result.deployed().mixture().settings()
    folder = Path(config.storage) / config.place()
    (folder / "search" / "selected.json").unlink()
    watcher = Watcher()
    evaluated_to_the_end(config, local_executor, watcher)
    assert search.read_search_result(opened) == result
    assert watcher.computed == []

"""Partitions that several workers shared: the same rows, one file, and nothing computed twice."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.distributed.schedule import Merge, WorkQueue
from mixednuts_dist.distributed.tasks import Task
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.errors import FingerprintMismatch, MissingArtifact
from mixednuts_dist.mixing.mixture import Mixture
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.stages import attack
from mixednuts_dist.stages.attack import attack_task
from mixednuts_dist.stages.evaluate import EvaluateTask
from mixednuts_dist.stages.partitioned import worker_spec
from mixednuts_dist.stages.points import StoredPoints
from mixednuts_dist.stages.progress import Silent
from mixednuts_dist.stages.runs import Run, open_run, run_store
from mixednuts_dist.storage.partitions import Partition, Span
from mixednuts_dist.storage.records import Receipt
from mixednuts_dist.storage.spans import finished_spans, merge_spans
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_footer


class Watcher(Silent):
    """Remembers the images of each receipt; `stop_after` receipts it interrupts the run, as Ctrl-C would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.done_before: list[tuple[int, int]] = []
        self.stop_after = stop_after

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:  # noqa: ARG002
        self.done_before = [(receipt.start, receipt.stop) for receipt in done]

    def partition_done(self, receipt: Receipt) -> None:
        self.pieces.append((receipt.start, receipt.stop))
        if len(self.pieces) == self.stop_after:
            raise KeyboardInterrupt


def rows(folder: Path) -> dict[str, list[Any]]:
    """Every bit of a stage's rows."""
    return pq.read_table(sorted(folder.glob("part-*.parquet"))).to_pydict()


def shared_out(opened: Run, task: Task, n_workers: int, smallest: int) -> int:
    """All of a stage in this process, as so many workers would share it; returns the number of pieces."""
    worker = AttackWorker(worker_spec(opened))
    worker.ready()
    queue, running, n_pieces = WorkQueue(opened.partitions, smallest=smallest), [], 0
    while True:
        while len(running) < n_workers and (work := queue.take(n_workers, worker)) is not None:
            running.append(work)
        if not running:
            return n_pieces
        work = running.pop(0)
        if isinstance(work, Merge):
            worker.merge(work.whole, work.spans, task)
        else:
            worker.process(work, task, queue.prefetch(n_workers, worker, work))
            n_pieces += 1
        queue.finished(work)


def test_shared_partitions_and_pieces_begun_ahead_have_the_rows_of_an_undivided_one(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = tiny(partition_size=24, compute={"batch_size": 16})
    small = config.with_changes(partition_size=2)
    mixture = Mixture(transform=LogitTransform(5.0, 3.0, -0.5), alpha=0.95, one_minus_alpha=0.05, surrogate_alpha=0.9)
    attacks = ("apgd-ce", "apgd-t", "fab-t", "square")
    n_pieces = {}
    for name, each, n_workers in (("shared", config, 2), ("undivided", config, 0), ("ahead", small, 1)):
        opened = open_run(each.with_changes(storage=str(tmp_path / name)))
        evaluate = EvaluateTask(
            stage="evaluate", fingerprint="e0", mixture=mixture, budget=AttackBudget(5, 2, 20),
            attacks=attacks, points=(StoredPoints("attack", opened.attack_fingerprint),),
        )  # fmt: skip
        for task in (attack_task(opened), evaluate):
            n_pieces[name, task.stage] = shared_out(opened, task, n_workers or 1, 2 if n_workers else 24)
    folders = [tmp_path / name / config.run_id() for name in ("shared", "undivided")]
    (ahead,) = (tmp_path / "ahead").iterdir()
    for stage in ("attack", "evaluate"):
        assert n_pieces["shared", stage] > 4
        assert n_pieces["undivided", stage] == 1
        assert rows(folders[0] / stage) == rows(folders[1] / stage) == rows(ahead / stage)
        assert [path.name for path in (folders[0] / stage).rglob("*.parquet")] == ["part-00000.parquet"]
        merged, alone = (read_footer(Store(str(folder)), f"{stage}/part-00000.parquet") for folder in folders)
        assert merged is not None
        assert alone is not None
        for field in ("start", "stop", "robust", "clean_correct", "node"):
            assert getattr(merged.receipt, field) == getattr(alone.receipt, field)


@pytest.mark.slow
def test_an_interrupted_shared_partition_goes_on_from_its_spans(
    tiny: Callable[..., RunConfig], ray_executor: Any
) -> None:
    config = tiny(partition_size=24, compute={"num_workers": 2})
    with pytest.raises(KeyboardInterrupt):
        attack.run(config, executor=ray_executor, progress=Watcher(stop_after=2))
    folder = Path(config.storage) / config.run_id() / "attack" / "spans"
    kept = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert kept
    again = Watcher()
    attack.run(config, executor=ray_executor, progress=again)
    computed = {i for start, stop in again.pieces for i in range(start, stop)}
    before = {i for start, stop in again.done_before for i in range(start, stop)}
    assert len(before) >= 8
    assert computed | before == set(range(24))
    assert not computed & before
    assert rows(folder.parent)["sample_id"] == list(range(24))


def test_files_that_are_no_spans_of_ours_are_left_alone_or_refused(tiny: Callable[..., RunConfig]) -> None:
    store, whole = run_store(tiny()), Partition(0, 0, 24)
    store.write("attack/spans/part-00000-0-8.parquet", b"cut short")
    store.write("attack/spans/part-00000-20-30.parquet", b"leads out of its partition")
    store.write("attack/spans/notes.txt", b"not ours")
    assert finished_spans(store, "attack", [whole], "f0") == {}


def test_another_driver_may_have_merged_already(tiny: Callable[..., RunConfig]) -> None:
    opened = open_run(tiny(partition_size=24, attack={"n_iter": 1, "n_target_classes": 1}))
    shared_out(opened, attack_task(opened), 1, 24)
    whole = opened.partitions[0]
    gone = [Span(0, 0, 10, whole), Span(0, 10, 24, whole)]
    before = opened.store.read("attack/part-00000.parquet")
    receipt = merge_spans(opened.store, "attack", whole, gone, opened.attack_fingerprint)
    assert (receipt.start, receipt.stop) == (0, 24)
    assert opened.store.read("attack/part-00000.parquet") == before
    with pytest.raises(FingerprintMismatch, match="this run is f0"):
        merge_spans(opened.store, "attack", whole, gone, "f0")
    opened.store.delete("attack/part-00000.parquet")
    with pytest.raises(MissingArtifact, match=r"part-00000-0-10\.parquet"):
        merge_spans(opened.store, "attack", whole, gone, opened.attack_fingerprint)

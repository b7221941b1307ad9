"""A bad machine never costs the run: the pool over workers that are threads, some of which fail as bad machines do."""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.distributed import pool as pool_module
from mixednuts_dist.distributed.executor import Executor, PoolSettings, WorkerLost, executing
from mixednuts_dist.distributed.pool import Pool
from mixednuts_dist.distributed.schedule import Places, WorkQueue
from mixednuts_dist.distributed.tasks import Task
from mixednuts_dist.distributed.worker_spec import Place
from mixednuts_dist.errors import BaseClassifierError, ClusterError, MixedNutsError, PartitionFailed, StoreError
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.records import PartitionSummary
from tests.helpers.stored_rows import summary
from tests.helpers.worker_specs import unchecked_spec

Act = Callable[[Partition], None]


class Machine:
    """One worker: a thread that answers the calls of the pool in their order."""

    def __init__(self, place: Place, act: Act, ready: Callable[[], None] = lambda: None) -> None:
        self.place, self.act, self.on_ready, self.ended = place, act, ready, False
        self.done, self.thread = list[int](), ThreadPoolExecutor(1)

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        return self.thread.submit(getattr(self, method), *arguments)

    def end(self) -> None:
        self.ended = True

    def locate(self) -> Place:
        return self.place

    def ready(self) -> float:
        self.on_ready()
        return 1e-9

    def process(self, partition: Partition, _task: Task, _ahead: Any) -> PartitionSummary:
        self.act(partition)
        self.done.append(partition.index)
        return replace(summary(partition), seconds=0.02)


class Machines(Executor):
    """`make` gives the n-th worker that is started."""

    def __init__(self, make: Callable[[int], Machine]) -> None:
        super().__init__()
        self.make, self.started = make, list[Machine]()

    def begin(self, *_: object) -> Machine:
        self.started.append(self.make(len(self.started) + 1))
        return self.started[-1]


class Stage:
    """The result of a pool of `n_workers` on `n_partitions`."""

    def __init__(
        self, folder: Path, make: Callable[[int], Machine], n_workers: int, n_partitions: int,
        kept: Machines | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        written = list[PartitionSummary]()
        self.executor = Machines(make)
        of_run = unchecked_spec(folder)
        task, asked = Task(stage="attack", content_hash="f"), PoolSettings(ComputeConfig(**settings), n_workers, 0)
        self.error: Exception | None = None
        if kept is not None:  # workers of an earlier stage, by `make`
            for i in range(n_workers):
                kept.release(of_run, asked, make(i))
            self.executor = kept
        try:
            with executing(self.executor, asked.compute) as used:
                Pool(of_run, task, asked, used, written.append).run(WorkQueue(split_images(n_partitions, 1)))
        except MixedNutsError as error:
            self.error = error
        self.written = sorted(each.partition for each in written)
        self.n_partitions = n_partitions

    def require_complete(self) -> None:
        assert self.error is None
        assert self.written == list(range(self.n_partitions))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(Places, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(Places, "LAST_SECONDS", 0.2)


def good(_: Partition) -> None:
    time.sleep(0.02)


def dead_card(_: Partition) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_dead_node_gets_two_partitions_of_a_hundred(tmp_path: Path) -> None:
    """Started again as often as it likes, the node never becomes good: partitions take their time elsewhere."""
    stage = Stage(tmp_path, lambda i: Machine(Place(f"node{i % 8}"), dead_card if i == 3 or i > 8 else good), 8, 100)
    stage.require_complete()
    bad = [machine for machine in stage.executor.started if machine.act is dead_card]
    assert all(machine.ended and not machine.done for machine in bad if machine.place.node == "node3")


@pytest.mark.parametrize("first", [True, False])
def test_a_dead_gpu_of_one_node_costs_nothing(tmp_path: Path, first: bool) -> None:
    """All workers run on one node; the dead GPU fails at once, before or after the other ones are ready."""

    def make(i: int) -> Machine:
        if i == 3 or i > 8:  # the fresh process gets the same GPU
            return Machine(Place("node", "3"), dead_card)
        return Machine(Place("node", str(i)), good, lambda: time.sleep(0.2 if first else 0))

    stage = Stage(tmp_path, make, 8, 100)
    stage.require_complete()
    n_tried = sum(machine.act is dead_card for machine in stage.executor.started)
    assert 1 <= n_tried <= (5 if first else 3), "the GPU is tried again only while nothing else runs"


@pytest.mark.parametrize("error", [ClusterError("torch cannot use the GPU"), WorkerLost("killed by signal 9")])
def test_a_node_that_cannot_start_workers_ends_nothing(tmp_path: Path, error: Exception) -> None:
    """One of the first workers is on that node, and so is each replacement of a preempted worker."""
    lost = iter([True])

    def lose_once(partition: Partition) -> None:
        if partition.index == 5 and next(lost, False):
            raise WorkerLost("preempted", machine=True)
        good(partition)

    def fail() -> None:
        raise error

    def make(i: int) -> Machine:
        bad = i == 3 or i > 8
        return Machine(Place("node3" if bad else f"node{i}"), lose_once, fail if bad else lambda: None)

    stage = Stage(tmp_path, make, 8, 400)
    stage.require_complete()
    assert 8 < len(stage.executor.started) < 60, "starts wait longer after each failure"


def test_a_failed_start_delays_only_its_own_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node b cannot start a worker, and a worker that then dies on node a is replaced at once."""
    monkeypatch.setattr(Places, "FIRST_SECONDS", 60.0)
    monkeypatch.setattr(Places, "LAST_SECONDS", 60.0)

    def fail() -> None:
        raise RuntimeError("no driver")

    def die(_: Partition) -> None:
        time.sleep(0.5)
        raise WorkerLost("preempted", machine=True)

    def make(i: int) -> Machine:
        return Machine(Place("b"), good, fail) if i == 2 else Machine(Place("a"), die if i == 1 else good)

    started = time.monotonic()
    stage = Stage(tmp_path, make, 2, 20)
    stage.require_complete()
    assert time.monotonic() - started < 30


def test_a_start_that_fails_everywhere_ends_the_stage(tmp_path: Path) -> None:
    def other_weights() -> None:
        raise BaseClassifierError("this machine holds other weights")

    stage = Stage(tmp_path, lambda i: Machine(Place(f"node{i}"), good, other_weights), 4, 10)
    assert isinstance(stage.error, BaseClassifierError)
    assert len(stage.executor.started) <= 8

    def killed() -> None:
        raise WorkerLost("killed by signal 9")

    stage = Stage(tmp_path, lambda _: Machine(Place("node"), good, killed), 1, 10)
    assert isinstance(stage.error, ClusterError)
    assert "in 3 tries; the last one ended with: killed by signal 9" in str(stage.error)


def test_each_exception_is_followed_by_a_fresh_worker(tmp_path: Path) -> None:
    broken = set[int]()

    def make(i: int) -> Machine:
        def sticky(partition: Partition) -> None:
            if partition.index == 3 and not broken:
                broken.add(i)
            if i in broken:
                raise RuntimeError("CUDA error: sticky")
            good(partition)

        return Machine(Place("node"), sticky)

    stage = Stage(tmp_path, make, 2, 20)
    stage.require_complete()
    assert len(stage.executor.started) == 3


def test_failing_partition_is_quarantined_after_two_nodes(tmp_path: Path) -> None:
    tried = list[str]()

    def make(i: int) -> Machine:
        place = Place(f"node{i % 2}")

        def poison(partition: Partition) -> None:
            if partition.index == 7:
                tried.append(place.node)
                raise ValueError("image 7 fails")
            good(partition)

        return Machine(place, poison)

    stage = Stage(tmp_path, make, 2, 20)
    assert isinstance(stage.error, PartitionFailed)
    assert "partition 7" in str(stage.error) and "image 7 fails" in str(stage.error)
    assert stage.written == [index for index in range(20) if index != 7]
    assert set(tried) == {"node0", "node1"} and len(tried) >= 3


def test_storage_failure_of_one_node_does_not_end_the_stage(tmp_path: Path) -> None:
    def no_storage(_: Partition) -> None:
        raise StoreError("the mount is gone")

    def make(i: int) -> Machine:
        bad = i == 1 or i > 4
        return Machine(Place("node1" if bad else f"node{i}"), no_storage if bad else good)

    stage = Stage(tmp_path, make, 4, 40)
    stage.require_complete()
    stage = Stage(tmp_path, lambda i: Machine(Place(f"node{i % 2}"), no_storage), 2, 10)
    assert isinstance(stage.error, StoreError)
    assert not stage.written
    assert all(machine.ended for machine in stage.executor.started)


@pytest.mark.parametrize("hangs_at", [0, 4])
def test_overdue_partition_is_taken_from_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs_at: int
) -> None:
    """Also before any partition is finished. Later results of the overdue worker are ignored."""
    monkeypatch.setattr("mixednuts_dist.distributed.schedule.LEAST_OVERDUE", 0.3)
    slow = iter([True])

    def hang_once(partition: Partition) -> None:
        if partition.index == hangs_at and next(slow, False):
            time.sleep(1.5)
            raise RuntimeError("no memory")
        good(partition)

    stage = Stage(tmp_path, lambda _: Machine(Place("node"), hang_once), 2 if hangs_at else 1, 12, watchdog=1.0)
    stage.require_complete()
    assert sum(hangs_at in machine.done for machine in stage.executor.started) == 1
    assert "TimeoutError: not finished after" in caplog.text


def test_stage_without_workers_waits_for_start_seconds(tmp_path: Path) -> None:
    """Also after workers were ready: the machines of a whole market may be gone for a day."""
    gone = threading.Event()

    def make(i: int) -> Machine:
        def leave(partition: Partition) -> None:
            if partition.index >= 3:
                raise WorkerLost("preempted", machine=True)

        return Machine(Place(f"node{i}"), leave, (lambda: None) if i == 1 else (lambda: bool(gone.wait(60))))

    started = time.monotonic()
    stage = Stage(tmp_path, make, 1, 10, start_seconds=0.5)
    assert isinstance(stage.error, ClusterError)
    assert "no worker was ready for 0.5 s: 1 were requested, each with 1 CPUs and 0 GPUs" in str(stage.error)
    assert stage.written == [0, 1, 2]
    assert time.monotonic() - started < 30
    gone.set()


def test_a_worker_that_never_becomes_ready_is_replaced(tmp_path: Path) -> None:
    ends = threading.Event()

    def make(i: int) -> Machine:
        slow = (lambda _: time.sleep(0.1)) if i == 1 else good
        return Machine(Place(f"node{i}"), slow, ends.wait if i == 2 else (lambda: None))

    stage = Stage(tmp_path, make, 2, 12, start_seconds=0.3)
    stage.require_complete()
    assert stage.executor.started[1].ended
    assert stage.executor.started[2].done
    ends.set()


def test_ready_workers_are_counted_before_the_first_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_LOOK_SECONDS", 60.0)
    exported: list[Any] = []
    monkeypatch.setattr(Machines, "export", lambda _self, _run_id, _stage, values: exported.append(values))
    stage = Stage(tmp_path, lambda _: Machine(Place("node"), good), 1, 1)
    stage.require_complete()
    seen = [(values["workers_ready"], values["partitions_left"]) for values in exported]
    assert list(dict.fromkeys(seen)) == [(0, 1), (1, 1), (0, 0)]


def test_kept_workers_that_died_between_stages_are_replaced(tmp_path: Path) -> None:
    def dead(_: int) -> Machine:
        machine = Machine(Place("node"), good)
        machine.locate = lambda: (_ for _ in ()).throw(WorkerLost("gone"))  # type: ignore[method-assign]
        return machine

    executor = Machines(lambda _: Machine(Place("other"), good))
    stage = Stage(tmp_path, dead, 4, 20, kept=executor)
    stage.require_complete()
    assert 1 <= len(executor.started) <= 4


def test_classifier_that_never_works_ends_the_stage_early(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda i: Machine(Place(f"node{i % 2}"), dead_card), 2, 24)
    assert isinstance(stage.error, PartitionFailed)
    assert re.search(
        r"(?s)partition \d+ .*CUDA.*All \d+ tries have failed, so the other partitions were not tried", str(stage.error)
    )
    assert len(stage.executor.started) < 24


def test_a_partition_is_tried_although_all_others_fail(tmp_path: Path) -> None:
    def only_first(partition: Partition) -> None:
        if partition.index:
            raise ValueError("this partition fails")

    stage = Stage(tmp_path, lambda _: Machine(Place("node"), only_first), 1, 3, max_tries=1)
    assert isinstance(stage.error, PartitionFailed)
    assert str(stage.error).count("this partition fails") == 2
    assert stage.written == [0]

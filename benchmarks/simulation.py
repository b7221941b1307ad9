"""Simulate clusters: the pool's queue with a simulated clock instead of Ray, or a pool of sleeping workers."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.uris import DatasetSource
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.distributed.pool import Pool
from mixednuts_dist.distributed.ray_executor import ActorWorker, RayExecutor
from mixednuts_dist.distributed.schedule import WorkQueue
from mixednuts_dist.distributed.tasks import Task
from mixednuts_dist.distributed.worker_spec import Place, WorkerSpec
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.records import PartitionSummary

PARTITION_SECONDS = 0.2  # reading the images of a partition and writing its file
_PROCESSES = 4


@dataclass(frozen=True)
class Outcome:
    """The duration of a simulated stage."""

    makespan: float  # seconds until the last worker ends
    ideal: float  # seconds if all workers worked until the end
    n_partitions: int

    @property
    def excess(self) -> float:
        """Share of the ideal by which the makespan is longer."""
        return self.makespan / self.ideal - 1


def simulate(
    seconds: Sequence[float],
    speeds: Sequence[float],
    *,
    partition_size: int,
    weights: Mapping[Partition, float] | None = None,
) -> Outcome:
    """Simulate a stage over images that cost `seconds` each at speed 1, with one worker per entry of `speeds`."""
    partitions = split_images(len(seconds), partition_size)
    queue = WorkQueue(partitions, weights)
    begun = list(itertools.accumulate(seconds, initial=0.0))
    free, tick = list(range(len(speeds))), itertools.count()
    running: list[tuple[float, int, int]] = []  # ends at, order, worker
    now = 0.0
    while True:
        while free and (taken := queue.take(free[-1], len(speeds))):
            worker, partition = free.pop(), taken[0]
            spent = PARTITION_SECONDS + begun[partition.stop] - begun[partition.start]
            heapq.heappush(running, (now + spent / speeds[worker], next(tick), worker))
        if not running:
            return Outcome(now, begun[-1] / sum(speeds), len(partitions))
        now, _, worker = heapq.heappop(running)
        free.append(worker)


class Sleeper:
    """A replacement of `AttackWorker` that sleeps; the `seed` of its spec holds the milliseconds per partition."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.seconds = spec.seed / 1000

    async def locate(self) -> Place:
        return Place(str(ray.get_runtime_context().get_node_id()))

    async def ready(self) -> float:
        return self.seconds

    async def process(self, partition: Partition, task: Task, _prefetched: tuple[Partition, ...]) -> PartitionSummary:
        started = time.perf_counter()
        await asyncio.sleep(self.seconds)
        return PartitionSummary(
            stage=task.stage, partition=partition.index, start=partition.start, stop=partition.stop,
            clean_correct=0, robust=0, seconds=time.perf_counter() - started, n_forward=len(partition), n_backward=0,
            node="", finished=time.time(),
        )  # fmt: skip


class SleepingExecutor(RayExecutor):
    """An executor of many workers, which are coroutines in `_PROCESSES` actors."""

    def __init__(self, n_workers: int) -> None:
        super().__init__()
        self._n_workers, self._begun = n_workers, list[Any]()

    def begin(self, spec: WorkerSpec, _: PoolSettings) -> "Bed":
        if len(self._begun) < _PROCESSES:
            concurrency = -(-self._n_workers // _PROCESSES)
            self._begun.append(ray.remote(Sleeper).options(num_cpus=0, max_concurrency=concurrency).remote(spec))
        else:
            self._begun.append(self._begun[-_PROCESSES])
        return Bed(self._begun[-1])

    def close(self) -> None:
        for actor in self._begun[:_PROCESSES]:
            ray.kill(actor)


class Bed(ActorWorker):
    """A worker that is a coroutine of an actor; all coroutines of an actor end together."""

    def end(self) -> None:
        pass


def sleep_through(n_workers: int, partitions: list[Partition], seconds: float, on_summary: Any) -> None:
    """Run the pool and its queue over all partitions with workers that sleep `seconds` per partition; needs Ray."""
    spec = WorkerSpec("memory://sleep", DatasetSource(""), ThreatModel("Linf", 0.1), {}, seed=round(1000 * seconds))
    task = Task(stage="", content_hash="")
    with SleepingExecutor(n_workers) as executor:
        pool = Pool(spec, task, PoolSettings(ComputeConfig(), n_workers, 0), executor, on_summary)
        pool.run(WorkQueue(partitions))

"""Workers that sleep instead of attacking, and a pool of a thousand of them in a few processes."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from ..attacks.budget import AttackBudget
from ..distributed.pool import Pool, PoolSettings
from ..distributed.schedule import WorkQueue
from ..distributed.tasks import Task, WorkerSpec
from ..storage.partitions import Partition
from ..storage.records import Receipt
from ..threat import ThreatModel

_PROCESSES = 4


class Sleeper:
    """Has the face of an `AttackWorker`; the seconds a piece are in its spec's `seed`, in thousandths."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.seconds = spec.seed / 1000

    async def ready(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def process(self, piece: Partition, task: Task) -> dict[Partition, Receipt]:
        started = time.perf_counter()
        await asyncio.sleep(self.seconds)
        receipt = Receipt(
            stage=task.stage, partition=piece.index, start=piece.start, stop=piece.stop, clean_correct=0, robust=0,
            seconds=time.perf_counter() - started, n_forward=len(piece), n_backward=0, node="", finished=time.time(),
        )  # fmt: skip
        return {piece: receipt}


@dataclass
class SleepingPool(Pool):
    """The pool as it is, but that its many workers are coroutines in `_PROCESSES` actors."""

    _shared: list[Any] = field(default_factory=list)

    def _new_actor(self) -> Any:
        if len(self._shared) < _PROCESSES:
            concurrency = -(-self.settings.n_workers // _PROCESSES)
            self._shared.append(ray.remote(Sleeper).options(num_cpus=0, max_concurrency=concurrency).remote(self.spec))
        else:
            self._shared.append(self._shared[-_PROCESSES])
        return self._shared[-1]

    def _end(self, actor: Any) -> None:
        pass

    def close(self) -> None:
        for actor in self._shared[:_PROCESSES]:
            ray.kill(actor)


def sleep_through(n_workers: int, partitions: list[Partition], seconds: float, on_receipt: Any) -> None:
    """All partitions, each slept for `seconds`, by the pool and its queue; needs Ray."""
    spec = WorkerSpec(
        store_uri="memory://sleep", data_uri="", std_uri="", rob_uri="", checksums={},
        threat=ThreatModel("Linf", 0.1), seed=round(1000 * seconds), ln_k=None, batch_size=1, n_threads=1,
    )  # fmt: skip
    task = Task("", "", AttackBudget())
    pool = SleepingPool(spec, task, PoolSettings(n_workers, 0, 0), on_receipt)
    try:
        pool.run(WorkQueue(partitions, smallest=len(partitions[0])))
    finally:
        pool.close()

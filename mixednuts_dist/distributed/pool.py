"""A pool of worker actors that pull partitions: bounded retries, poison partitions set aside, lost workers replaced."""

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..data.partitions import Partition
from ..data.records import Receipt
from ..data.store import Store
from ..errors import ClusterError, MixedNutsError, PartitionFailed
from .worker import AttackActor, AttackTask, EvaluateTask, WorkerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolSettings:
    """How many actors, what each one reserves, and how often a partition may fail."""

    n_workers: int
    num_cpus: float
    num_gpus: float
    max_tries: int = 3


@dataclass
class _Failure:
    tries: int = 0
    reason: str = ""
    log: str = ""


@dataclass
class Pool:
    """Runs one task over partitions; every actor holds at most one partition, so a lost one costs one partition."""

    spec: WorkerSpec
    task: AttackTask | EvaluateTask
    settings: PoolSettings
    on_receipt: Callable[[Receipt], None]
    _queue: deque[Partition] = field(default_factory=deque)
    _running: dict[Any, tuple[Any, Partition | None]] = field(default_factory=dict)  # ref -> actor, its partition
    _failures: dict[Partition, _Failure] = field(default_factory=dict)
    _poisoned: list[Partition] = field(default_factory=list)
    _failed_starts: int = 0

    def run(self, partitions: Sequence[Partition]) -> None:
        """Until each partition is written or set aside.

        Raises:
            PartitionFailed: after all others are done, naming the partitions that failed all of their tries.
            ClusterError: at once, where a worker cannot start; a worker's own MixedNutsError is passed on as it is.
        """
        self._queue.extend(partitions)
        for _ in range(min(self.settings.n_workers, len(partitions))):
            self._hire()
        try:
            while self._running:
                done, _ = ray.wait(list(self._running), num_returns=1, timeout=None)
                self._settle(done[0])
        finally:
            self._dismiss()
        self._raise_if_poisoned()

    def _hire(self) -> None:
        """Ask for an actor; it joins when the cluster has room, and partitions go to whoever is there."""
        actor = AttackActor.options(
            num_cpus=self.settings.num_cpus, num_gpus=self.settings.num_gpus, max_restarts=0, max_task_retries=0
        ).remote(self.spec)
        self._running[actor.ready.remote()] = (actor, None)

    def _settle(self, ref: Any) -> None:
        """Take in one result, good or bad, and give the actor its next partition."""
        actor, partition = self._running.pop(ref)
        try:
            result = ray.get(ref)
        except RayTaskError as error:
            self._task_failed(actor, partition, error)
        except RayActorError as error:
            self._actor_lost(partition, error)
        except RayError as error:
            ray.kill(actor)
            self._actor_lost(partition, error)
        else:
            if partition is not None:
                self.on_receipt(result)
            self._assign(actor)

    def _assign(self, actor: Any) -> None:
        if not self._queue:
            ray.kill(actor)
            return
        partition = self._queue.popleft()
        self._running[actor.process.remote(partition, self.task)] = (actor, partition)

    def _task_failed(self, actor: Any, partition: Partition | None, error: RayTaskError) -> None:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if partition is None:
            raise cause if isinstance(cause, MixedNutsError) else ClusterError(f"a worker cannot start: {error}")
        self._count(partition, f"{type(cause).__name__}: {cause}", str(error))
        self._assign(actor)

    def _actor_lost(self, partition: Partition | None, error: RayError) -> None:
        """The process or its machine is gone: its partition goes back to the queue and a new actor is asked for."""
        logger.warning("lost a worker%s: %s", f" at {partition}" if partition else "", _first_line(error))
        if partition is None:
            self._failed_starts += 1
            if self._failed_starts >= self.settings.max_tries * self.settings.n_workers:
                raise ClusterError(f"workers died {self._failed_starts} times before they were ready: {error}")
        else:
            self._count(partition, f"the worker died: {_first_line(error)}", "".join(traceback.format_exception(error)))
        if self._queue:
            self._hire()

    def _count(self, partition: Partition, reason: str, log: str) -> None:
        failure = self._failures.setdefault(partition, _Failure())
        failure.tries, failure.reason, failure.log = failure.tries + 1, reason, log
        if failure.tries < self.settings.max_tries:
            logger.warning("%s: try %d of %d failed: %s", partition, failure.tries, self.settings.max_tries, reason)
            self._queue.append(partition)
            return
        self._poisoned.append(partition)
        Store(self.spec.store_uri).write(_log_path(partition), f"{self.task.stage} {partition}\n{log}\n".encode())

    def _dismiss(self) -> None:
        for actor, _ in self._running.values():
            ray.kill(actor)
        self._running.clear()

    def _raise_if_poisoned(self) -> None:
        if not self._poisoned:
            return
        store = Store(self.spec.store_uri)
        lines = [
            f"{partition} failed {self._failures[partition].tries} of {self.settings.max_tries} tries: "
            f"{self._failures[partition].reason}. Log: {store.address(_log_path(partition))}"
            for partition in sorted(self._poisoned, key=lambda partition: partition.index)
        ]
        raise PartitionFailed("\n".join(lines))


def _log_path(partition: Partition) -> str:
    return f"errors/{partition.index:05d}.txt"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

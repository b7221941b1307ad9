"""A pool of workers that pull partitions. A bad machine never costs the run.

A worker computes one partition at a time and writes its file. After any exception, a fresh process replaces the worker,
and the partition is computed again. A place (a node, or one GPU of a node) with two failures in a row gets no more work
until a worker succeeds there. If nothing else runs, such a place is tried again after a back-off.

More workers may be requested than the cluster has room for: an autoscaler sees the requests, and the workers join with
the new nodes. The driver holds counts and times, never images.
"""

import logging
import math
import queue
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import StoreError
from ..storage.partitions import Partition
from ..storage.records import PartitionSummary
from ..storage.store import Store
from .executor import Executor, PoolSettings, Worker, WorkerLost
from .measurements import Measurements
from .schedule import Failures, Places, WorkQueue
from .starts import Starts
from .tasks import Task
from .worker_spec import Place, WorkerSpec

logger = logging.getLogger(__name__)

_MEASURE_SECONDS = 600.0  # at most, until a worker has measured rows and precisions
_LOOK_SECONDS = 5.0  # the driver sleeps at most this long before it looks at the clock


@dataclass(eq=False)
class _Slot:
    """One worker and what it is doing."""

    worker: Worker
    fresh: bool  # started for this stage
    place: Place | None = None  # unknown until the first call returns
    device: str = ""  # its type; empty until the worker is ready
    call: "Future[Any] | None" = None  # the open call
    method: str = ""  # the last call
    partition: Partition | None = None  # the argument of the open call
    since: float = 0.0  # monotonic time when the open call began
    n_prefetched: int = 0

    @property
    def node(self) -> str:
        return self.place.node if self.place else ""


@dataclass
class Pool:
    """Runs one task over a queue of partitions."""

    spec: WorkerSpec
    task: Task
    settings: PoolSettings
    executor: Executor
    on_summary: Callable[[PartitionSummary], None] = lambda _summary: None  # one more partition is written
    on_look: Callable[[int, int], None] = lambda _ready, _requested: None  # numbers of ready and of requested workers
    counts: Counter[str] = field(default_factory=Counter)  # for metrics
    _slots: list[_Slot] = field(default_factory=list)
    _completed: "queue.SimpleQueue[_Slot]" = field(default_factory=queue.SimpleQueue)
    _places: Places = field(default_factory=Places)

    def run(self, queue: WorkQueue) -> None:
        """Return when each partition is written or quarantined.

        Raises:
            PartitionFailed: naming the quarantined partitions after all others are done; earlier if nothing works.
            ClusterError: if no worker starts; a worker's own MixedNutsError is passed on unchanged.
            StoreError: if no worker can read or write the storage.
        """
        self._queue, store = queue, Store(self.spec.run_uri)
        self._failures = Failures(store, self.task.stage, self.settings.max_tries)
        self._measurements = Measurements(store, self.spec)
        self._starts, self._next_look = Starts(self.settings), 0.0
        try:
            while n_left := self._n_left():
                self._look(n_left)
                self._start_workers(n_left)
                for slot in self._idle():
                    self._give(slot)
                for slot in self._wait():
                    self._settle(slot)
                self._kill_overdue()
                self._starts.require_ready(bool(self._ready()), self.executor)
            for slot in self._idle():
                self._slots.remove(slot)
                self.executor.release(self.spec, self.settings, slot.worker)
        finally:
            for slot in list(self._slots):
                self._end(slot)
            self._next_look = 0.0
            self._look(self._n_left())
        self._failures.raise_if_quarantined()

    def _n_left(self) -> int:
        return len(self._queue) + sum(bool(slot.partition) for slot in self._slots)

    def _ready(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.device]

    def _idle(self) -> list[_Slot]:
        return [slot for slot in self._ready() if not slot.call]

    def _look(self, n_left: int) -> None:
        """Report the numbers of workers and export the metrics, every few seconds."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        n_ready, requested = len(self._ready()), self.settings.n_workers
        self.on_look(n_ready, requested)
        numbers = {"partitions_left": n_left, "workers_ready": n_ready, "workers_requested": requested}
        self.executor.export(self.spec.run_id, self.task.stage, {**self.counts, **numbers})

    def _start_workers(self, n_left: int) -> None:
        """Start workers while partitions wait for them; replacements of failed starts wait for their back-off."""
        for _ in range(min(self.settings.n_workers, n_left) - len(self._slots) - self._starts.n_delayed()):
            kept = self.executor.kept(self.spec, self.settings)
            slot = _Slot(kept or self.executor.begin(self.spec, self.settings), fresh=kept is None)
            self._slots.append(slot)
            self._begin(slot, "locate")

    def _give(self, slot: _Slot) -> None:
        """Begin the next call of an idle worker: a partition, or a measurement that its type of device lacks."""
        unmeasured, ready = self._measurements.missing(slot.device), self._ready()
        if unmeasured and any(each.call and each.method == "measure" and each.device == slot.device for each in ready):
            return
        if self._places.is_bad(slot.place) and not self._may_try_again(slot):
            return
        slot.partition = partition = self._queue.take(slot)
        if partition is None:
            return
        if unmeasured:
            self._begin(slot, "measure", partition)
        else:
            prefetched = self._queue.reserve(slot, len(ready), partition)
            measured = self._measurements.of(slot.device)
            self._begin(slot, "process", partition, self.task, prefetched, measured, n_prefetched=len(prefetched))

    def _may_try_again(self, slot: _Slot) -> bool:
        """Whether a bad place gets work because nothing else runs.

        Raises:
            StoreError, PartitionFailed: if trying again makes no sense.
        """
        ready = self._ready()
        if any(each.call or not self._places.is_bad(each.place) for each in ready):
            return False
        errors = self._places.last_errors()
        if all(isinstance(error, StoreError) for error in errors):
            raise errors[0]
        if len(ready) < len(self._slots) or self._starts.n_delayed():  # other workers may come
            return time.monotonic() - self._last_failure > self._places.back_off(slot.place)
        self._failures.raise_if_hopeless()
        return True

    def _begin(self, slot: _Slot, method: str, *arguments: Any, n_prefetched: int = 0) -> None:
        slot.method, slot.since, slot.n_prefetched = method, time.monotonic(), n_prefetched
        slot.call = slot.worker.call(method, *arguments)
        slot.call.add_done_callback(lambda _: self._completed.put(slot))

    def _wait(self) -> list[_Slot]:
        """Return the workers whose calls have completed, after waiting for the first one."""
        try:
            completed = [self._completed.get(timeout=_LOOK_SECONDS)]
        except queue.Empty:
            return []
        while not self._completed.empty():
            completed.append(self._completed.get())
        return completed

    def _settle(self, slot: _Slot) -> None:
        """Note the result of a worker's call, good or bad."""
        if slot.call is None:
            return  # it was ended
        call, partition = slot.call, slot.partition
        slot.call = None
        if isinstance(error := call.exception(), Exception):
            self._failed(slot, error)
        elif slot.method == "locate":
            slot.place = call.result()
            self._begin(slot, "ready")
        elif slot.method == "ready":
            slot.device, self._next_look = call.result(), 0.0
            self._starts.succeeded(slot.node)
            logger.info("%s: a worker is ready", self.task.stage, extra={"node": slot.node, **self.settings.placement})
        elif partition is not None:
            slot.partition = None
            if slot.method == "measure":
                self._measurements.keep(slot.device, call.result())
                self._queue.put_back(partition, failed=False)
            else:
                self._places.succeeded(slot.place)
                self._failures.succeeded()
                self._queue.finished(partition, call.result().seconds)
                self.on_summary(call.result())

    def _failed(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker whose call raised, and decide who is to blame: the partition, the place or the storage."""
        lost = isinstance(error, WorkerLost)
        gone = isinstance(error, WorkerLost) and (error.machine or self.executor.is_gone(slot.node))
        reason = str(error).strip().partition("\n")[0] or "WorkerLost" if lost else f"{type(error).__name__}: {error}"
        logger.warning("%s a worker: %s", "lost" if lost else "replacing", reason)
        partition, n_nodes = slot.partition, len({each.node for each in self._ready()})
        self._end(slot)
        if partition is None:
            if slot.fresh and not gone:
                self._starts.failed(slot.node, error, len(self._slots), any(each.place for each in self._slots))
            return
        if not gone:
            self._places.failed(slot.place, error)
            self._last_failure = time.monotonic()
        log = "".join(traceback.format_exception(error))
        if gone:
            again = self._failures.machine_lost(partition, reason, log)
        elif isinstance(error, StoreError):
            again = True  # the storage failed, not the partition
        else:
            what = f"the worker died: {reason}" if lost else reason
            again = self._failures.failed(partition, what, log, slot.node, n_nodes)
        if again:
            self._queue.put_back(partition, failed=not gone)
            self.counts["retries"] += 1

    def _kill_overdue(self) -> None:
        """Replace workers whose call takes far longer than it should."""
        for slot in list(self._slots):
            taken, allowed = time.monotonic() - slot.since, self._seconds_allowed(slot)
            if taken > allowed:
                what = f"not finished after {taken:.0f} s; at most {allowed:.0f} s are allowed"
                self._failed(slot, TimeoutError(what))

    def _seconds_allowed(self, slot: _Slot) -> float:
        if slot.method == "ready":
            return math.inf if slot.device else self.settings.start_seconds
        if slot.partition is None:  # idle, or waiting for a machine
            return math.inf
        n_tries = self._failures.tries(slot.partition)
        if slot.method == "measure":  # all workers on such devices wait for it
            allowed = _MEASURE_SECONDS
        else:
            allowed = self._queue.seconds_allowed(slot.partition, self.settings.watchdog)
        # It may just be slow, so each try has twice the time. Prefetched partitions are computed in the same batches.
        return allowed * 2.0**n_tries * (1 + slot.n_prefetched)

    def _end(self, slot: _Slot) -> None:
        """End a worker, even during a call."""
        self._slots.remove(slot)
        slot.call = slot.partition = None
        slot.worker.end()
        self._queue.release(slot)

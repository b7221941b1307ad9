"""A pool of workers that pull partitions. A bad machine never costs the run.

A worker computes one partition at a time. It is replaced by a fresh process after any exception. The partitions that it
held are computed again: the current one, those that it had computed but could not write yet, and its prefetched ones. A
place (a node, or one GPU of a node) with two failures in a row gets no more work until a worker succeeds there. If
nothing else runs, such a place is tried again after a back-off.

More workers may be requested than the cluster has room for: an autoscaler sees the requests, and the workers join with
the new nodes. The driver holds counts and times, never images.
"""

import logging
import queue
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import ClusterError, MixedNutsError, StoreError
from ..storage.partitions import Partition
from ..storage.records import Receipt
from ..storage.store import Store
from .executor import Executor, PoolSettings, Worker, WorkerLost
from .measurements import Measurements
from .schedule import Failures, Places, WorkQueue
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
    place: Place | None = None  # unknown until the worker answers for the first time
    device: str = ""  # its type; empty until the worker is ready
    call: "Future[Any] | None" = None  # the open call
    method: str = ""  # of the last call
    partition: Partition | None = None  # being computed
    since: float = 0.0  # monotonic time when it started
    n_prefetched: int = 0
    unwritten: list[Partition] = field(default_factory=list)  # computed, but not in the storage yet

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
    on_receipt: Callable[[Receipt], None] = lambda _receipt: None  # one more partition is written
    on_look: Callable[[int, int], None] = lambda _ready, _requested: None  # numbers of ready and of requested workers
    counts: Counter[str] = field(default_factory=Counter)  # for metrics
    _completed: "queue.SimpleQueue[Future[Any]]" = field(default_factory=queue.SimpleQueue)
    _slots: list[_Slot] = field(default_factory=list)
    _open: "dict[Future[Any], _Slot]" = field(default_factory=dict)
    _places: Places = field(default_factory=Places)
    _starts: Places = field(default_factory=Places)  # nodes, and their failed starts
    _delayed: list[float] = field(default_factory=list)  # when the next replacements of failed starts may begin
    _n_failed_starts: int = 0
    _any_ready: bool = False

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
        self._seen_ready = looked = time.monotonic()
        self._look()
        try:
            while len(queue) or any(slot.partition or slot.unwritten for slot in self._slots):
                self._start_workers()
                for slot in self._idle():
                    self._give(slot)
                for call in self._wait():
                    self._settle(call)
                self._stop_overdue()
                self._require_ready()
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look()
            for slot in self._idle():
                self._slots.remove(slot)
                self.executor.release(self.spec, self.settings, slot.worker)
        finally:
            for slot in list(self._slots):
                self._end(slot)
            self._look()
        self._failures.raise_if_quarantined()

    def _look(self) -> None:
        """Report the numbers of workers, and export the metrics."""
        ready, requested = self._n_ready(), self.settings.n_workers
        self.on_look(ready, requested)
        n_held = sum(bool(slot.partition) + len(slot.unwritten) for slot in self._slots)
        numbers = {
            "partitions_left": len(self._queue) + n_held,
            "workers_ready": ready,
            "workers_requested": requested,
        }
        self.executor.export(self.spec.run_id, self.task.stage, {**self.counts, **numbers})

    def _idle(self) -> list[_Slot]:
        """Return the ready workers without an open call."""
        return [slot for slot in self._slots if slot.device and not slot.call]

    def _n_ready(self) -> int:
        return sum(bool(slot.device) for slot in self._slots)

    def _start_workers(self) -> None:
        """Start workers while partitions wait for them; replacements of failed starts wait for their back-off."""
        now = time.monotonic()
        self._delayed = [due for due in self._delayed if due > now]
        n_useful = len(self._queue) + sum(bool(slot.partition or slot.unwritten) for slot in self._slots)
        for _ in range(min(self.settings.n_workers, n_useful) - len(self._slots) - len(self._delayed)):
            fresh = not self.executor.is_kept(self.spec, self.settings)
            slot = _Slot(self.executor.hire(self.spec, self.settings), fresh)
            self._slots.append(slot)
            self._begin(slot, "locate")

    def _give(self, slot: _Slot) -> None:
        """Begin the next call of a worker that is ready, if there is one."""
        if self._measurements.missing(slot.device) and self._is_measuring(slot.device):
            return
        allowed = not self._places.is_bad(slot.place) or self._may_try_again(slot)
        partition = slot.partition = self._queue.take(slot) if allowed else None
        slot.since = time.monotonic()
        if partition is None:
            if slot.unwritten:
                self._begin(slot, "flush")
        elif self._measurements.missing(slot.device):
            self._begin(slot, "measure", partition)
        else:
            self._process(slot, partition)

    def _process(self, slot: _Slot, partition: Partition) -> None:
        prefetched = self._queue.reserve(slot, self._n_ready(), partition)
        slot.since, slot.n_prefetched = time.monotonic(), len(prefetched)
        self._begin(slot, "process", partition, self.task, prefetched, self._measurements.of(slot.device))

    def _is_measuring(self, device: str) -> bool:
        return any(slot.call and slot.method == "measure" and slot.device == device for slot in self._slots)

    def _may_try_again(self, slot: _Slot) -> bool:
        """Whether a bad place gets work because nothing else runs.

        Raises:
            StoreError, PartitionFailed: if trying again makes no sense.
        """
        if any(each.call and each.device for each in self._slots):
            return False
        if any(not self._places.is_bad(each.place) for each in self._slots if each.device):
            return False
        errors = self._places.last_errors()
        if all(isinstance(error, StoreError) for error in errors):
            raise errors[0]
        if any(not each.device for each in self._slots) or self._delayed:  # other workers may come
            return time.monotonic() - self._last_failure > self._places.back_off(slot.place)
        self._failures.raise_if_hopeless()
        return True

    def _begin(self, slot: _Slot, method: str, *arguments: Any) -> None:
        slot.method, slot.call = method, slot.worker.call(method, *arguments)
        self._open[slot.call] = slot
        slot.call.add_done_callback(self._completed.put)

    def _wait(self) -> "list[Future[Any]]":
        """Return all calls that have completed, after waiting for the first one."""
        try:
            completed = [self._completed.get(timeout=_LOOK_SECONDS)]
        except queue.Empty:
            return []
        while not self._completed.empty():
            completed.append(self._completed.get())
        return completed

    def _settle(self, call: "Future[Any]") -> None:
        """Note the result of a call, good or bad."""
        slot = self._open.pop(call, None)
        if slot is None:
            return  # its worker was ended
        slot.call = None
        try:
            result = call.result()
        except Exception as error:
            self._failed(slot, error)
            return
        if slot.method == "locate":
            slot.place = result
            self._begin(slot, "ready")
        elif slot.method == "ready":
            slot.device, self._any_ready = result, True
            self._starts.succeeded(slot.node)
            logger.info("%s: a worker is ready", self.task.stage, extra={"node": slot.node, **self.settings.placement})
        elif slot.method == "measure":
            self._measurements.keep(slot.device, result)
            assert slot.partition is not None
            self._process(slot, slot.partition)
        else:
            self._written(slot, result)

    def _written(self, slot: _Slot, receipts: dict[Partition, Receipt]) -> None:
        """Note that a worker has computed its partition and that the storage has accepted the files of `receipts`."""
        if slot.partition:
            slot.unwritten.append(slot.partition)
            slot.partition = None
        self._places.succeeded(slot.place)
        self._failures.succeeded()
        for partition, receipt in receipts.items():
            if partition in slot.unwritten:
                slot.unwritten.remove(partition)
                self._queue.finished(partition, receipt.seconds)
                self.on_receipt(receipt)

    def _failed(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker whose call raised, and decide who is to blame: the partition, the place or the storage."""
        lost = isinstance(error, WorkerLost)
        reason = _first_line(error) if lost else f"{type(error).__name__}: {error}"
        gone = isinstance(error, WorkerLost) and (error.machine or self.executor.is_gone(slot.node))
        logger.warning("%s a worker: %s", "lost" if lost else "replacing", reason)
        partition, log = slot.partition, "".join(traceback.format_exception(error))
        if not slot.device:
            self._end(slot)
            if slot.fresh and not gone:
                self._start_failed(slot.node, error)
            return
        if not gone:
            self._places.failed(slot.place, error)
            self._last_failure = time.monotonic()
        blamed = [partition] if partition else [*slot.unwritten]
        n_nodes = len({each.node for each in self._slots if each.device})
        self._end(slot, but=blamed)
        for each in blamed:
            if gone or (lost and not partition):
                again = self._failures.machine_lost(each, reason, log)
            elif isinstance(error, StoreError):
                again = True  # the storage failed, not the partition
            else:
                what = f"the worker died: {reason}" if lost else reason
                again = self._failures.failed(each, what, log, slot.node, n_nodes)
            if again:
                self._put_back(each, failed=not gone)

    def _start_failed(self, node: str, error: Exception) -> None:
        """Have a worker started again after a back-off; raise the error if no worker has ever been ready."""
        n_in_a_row = self._starts.failed(node, error)
        self._n_failed_starts += 1
        if not self._any_ready:
            others = any(slot.place for slot in self._slots)
            too_often = self._n_failed_starts >= self.settings.max_tries * self.settings.n_workers
            died = isinstance(error, WorkerLost)
            if too_often or (not others and n_in_a_row >= self.settings.max_tries) or not (self._slots or died):
                raise (
                    error
                    if isinstance(error, MixedNutsError)
                    else ClusterError(
                        f"no worker could start in {self._n_failed_starts} tries; the last one ended with: {error}"
                    )
                )
        self._delayed.append(time.monotonic() + self._starts.back_off(node))

    def _put_back(self, partition: Partition, *, failed: bool) -> None:
        self._queue.put_back(partition, failed=failed)
        self.counts["retries"] += 1

    def _stop_overdue(self) -> None:
        """Stop workers that take far longer for a partition than the finished ones suggest."""
        for slot in list(self._slots):
            if slot.partition is None:
                continue
            taken = time.monotonic() - slot.since
            allowed = self._queue.seconds_allowed(slot.partition, self.settings.watchdog)
            if slot.method == "measure":  # all workers on such devices wait for it
                allowed = _MEASURE_SECONDS
            allowed *= 2 ** self._failures.tries(slot.partition)  # it may just be slow: each try has twice the time
            allowed *= 1 + slot.n_prefetched  # those are computed in the same batches
            if taken > allowed:
                self._failed(
                    slot, TimeoutError(f"not finished after {taken:.0f} s; at most {allowed:.0f} s are allowed")
                )

    def _require_ready(self) -> None:
        """Raise ClusterError if no worker has been ready for `start_seconds`."""
        now, settings = time.monotonic(), self.settings
        if any(slot.device for slot in self._slots):
            self._seen_ready = now
        elif now - self._seen_ready > settings.start_seconds:
            where = "".join(f", {name} {value}" for name, value in settings.placement.items())
            raise ClusterError(
                f"no worker was ready for {settings.start_seconds:g} s: {settings.n_workers} were requested, each with "
                f"{settings.num_cpus:g} CPUs and {settings.num_gpus:g} GPUs{where}; {self.executor.room()}. Change "
                "compute.num_workers, num_cpus or num_gpus to what it has, or raise compute.start_seconds"
            )

    def _end(self, slot: _Slot, but: "list[Partition] | tuple[()]" = ()) -> None:
        """End a worker, also in the middle of a call; what it held is queued again, except for `but`."""
        self._slots.remove(slot)
        if slot.call is not None:
            self._open.pop(slot.call, None)
        slot.worker.end()
        self._queue.release(slot)
        for partition in [*slot.unwritten, *([slot.partition] if slot.partition else [])]:
            if partition not in but:
                self._put_back(partition, failed=False)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

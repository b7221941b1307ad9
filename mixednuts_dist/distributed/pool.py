"""Compute partitions on a pool of workers, and keep the run going when workers or machines fail.

After any exception, a new process replaces the worker, and its partition is computed again. A place (a node, or one GPU
of a node) with two failures in a row gets no more partitions until a worker that still computes there succeeds. If
nothing else runs, such a place is tried again.

More workers may be requested than the cluster has room for: an autoscaler sees the requests, and the workers start on
the new nodes. The driver holds counts and times, never images.
"""

import logging
import math
import queue
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import ClusterError, MixedNutsError, StoreError
from ..storage.partitions import Partition
from ..storage.records import PartitionSummary
from ..storage.store import Store
from .executor import Executor, PoolSettings, Worker, WorkerLost
from .schedule import Failures, Places, WorkQueue, in_short
from .tasks import Task
from .worker_spec import Place, WorkerSpec

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0  # the driver waits at most this long for results before it checks the time limits


@dataclass(eq=False)
class _Slot:
    """One worker and what it is doing."""

    worker: Worker
    fresh: bool  # started for this stage
    place: Place | None = None  # unknown until the first call returns
    pass_seconds: float | None = None  # per image and forward pass; None until the worker is ready
    method: str = ""  # the call that has not completed yet; "" if the worker is idle
    since: float = 0.0  # monotonic time at which that call began
    partition: Partition | None = None  # the argument of `process`
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
    on_summary: Callable[[PartitionSummary], None] = lambda _summary: None  # called after each written partition
    on_look: Callable[[int, int], None] = lambda _ready, _requested: None  # gets the ready and the requested workers
    counts: Counter[str] = field(default_factory=Counter)  # for metrics
    _slots: list[_Slot] = field(default_factory=list)
    _completed: "queue.SimpleQueue[tuple[_Slot, Future[Any]]]" = field(default_factory=queue.SimpleQueue)
    _places: Places = field(default_factory=Places)
    _starts: Places = field(default_factory=Places)  # the nodes on which workers have failed to start
    _n_failed_starts: int = 0
    _due: list[float] = field(default_factory=list)  # when the replacements of failed starts may begin, after back-off
    _any_ready: bool = False  # whether any worker has ever been ready

    def run(self, partitions: WorkQueue) -> None:
        """Compute all partitions, and return when each of them is written or quarantined.

        Raises:
            PartitionFailed: naming the quarantined partitions after all others are done; earlier if every try fails.
            ClusterError: if no worker starts; a worker's own MixedNutsError is passed on unchanged.
            StoreError: if no worker can read or write the storage.
        """
        self._queue, self._last_ready = partitions, time.monotonic()
        self._failures = Failures(Store(self.spec.run_uri), self.task.stage, self.settings.compute.max_tries)
        try:
            while n_left := self._n_left():
                self._look(n_left)
                self._start_workers(n_left)
                for slot in self._idle():
                    self._give(slot)
                with suppress(queue.Empty):
                    slot, call = self._completed.get(timeout=_LOOK_SECONDS)
                    if slot in self._slots:  # otherwise the worker was ended during the call
                        self._settle(slot, call)
                self._kill_overdue()
                self._require_ready()
            for slot in self._idle():
                self._slots.remove(slot)
                self.executor.release(self.spec, self.settings, slot.worker)
        finally:
            for slot in list(self._slots):
                self._end(slot)
            self._look(self._n_left())
        self._failures.raise_if_quarantined()

    def _n_left(self) -> int:
        return len(self._queue) + sum(bool(slot.partition) for slot in self._slots)

    def _ready(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.pass_seconds is not None]

    def _idle(self) -> list[_Slot]:
        return [slot for slot in self._ready() if not slot.method]

    def _look(self, n_left: int) -> None:
        n_ready, requested = len(self._ready()), self.settings.n_workers
        self.on_look(n_ready, requested)
        numbers = {"partitions_left": n_left, "workers_ready": n_ready, "workers_requested": requested}
        self.executor.export(self.spec.run_id, self.task.stage, {**self.counts, **numbers})

    def _start_workers(self, n_left: int) -> None:
        """Start workers while partitions wait for them; replacements of failed starts wait for their back-off."""
        self._due = [due for due in self._due if due > time.monotonic()]
        for _ in range(min(self.settings.n_workers, n_left) - len(self._slots) - len(self._due)):
            kept = self.executor.kept(self.spec, self.settings)
            slot = _Slot(kept or self.executor.begin(self.spec, self.settings), fresh=kept is None)
            self._slots.append(slot)
            self._begin(slot, "locate")

    def _give(self, slot: _Slot) -> None:
        if self._places.is_bad(slot.place) and not self._may_try_again(slot):
            return
        if taken := self._queue.take(slot, len(self._ready())):
            slot.partition, slot.n_prefetched = taken[0], len(taken) - 1
            self._begin(slot, "process", taken[0], self.task, taken[1:])

    def _may_try_again(self, slot: _Slot) -> bool:
        """Whether a bad place gets work because nothing else runs; ends the stage if trying again makes no sense."""
        ready = self._ready()
        if any(each.method or not self._places.is_bad(each.place) for each in ready):
            return False
        errors = self._places.last_errors()
        if all(isinstance(error, StoreError) for error in errors):
            raise errors[0]
        if len(ready) < len(self._slots) or self._due:  # other workers may come
            return time.monotonic() - self._last_failure > self._places.back_off(slot.place)
        self._failures.raise_if_hopeless()
        return True

    def _begin(self, slot: _Slot, method: str, *arguments: Any) -> None:
        slot.method, slot.since = method, time.monotonic()
        slot.worker.call(method, *arguments).add_done_callback(lambda call: self._completed.put((slot, call)))

    def _settle(self, slot: _Slot, call: "Future[Any]") -> None:
        """Process the result or the exception of a worker's call, and make the next call that follows from it."""
        method, slot.method = slot.method, ""
        if isinstance(error := call.exception(), Exception):
            self._failed(slot, error)
        elif method == "locate":
            slot.place = call.result()
            self._begin(slot, "ready")
        elif method == "ready":
            slot.pass_seconds, self._any_ready = call.result(), True
            self._starts.succeeded(slot.node)
            logger.info("%s: a worker is ready", self.task.stage, extra={"node": slot.node, **self.settings.placement})
        elif slot.partition is not None:
            self._places.succeeded(slot.place)
            self._failures.any_done = True
            self._queue.finished(slot.partition, call.result().seconds)
            slot.partition = None
            self.on_summary(call.result())

    def _failed(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker whose call raised, and decide who is to blame: the partition, the place or the storage."""
        lost = isinstance(error, WorkerLost)
        gone = isinstance(error, WorkerLost) and (error.machine or self.executor.is_gone(slot.node))
        logger.warning("%s a worker: %s", "lost" if lost else "replacing", in_short(error))
        partition, n_nodes = slot.partition, len({each.node for each in self._ready()})
        self._end(slot)
        if partition is None:
            if slot.fresh and not gone:
                self._start_failed(slot.node, error)
            return
        if not gone:
            self._places.failed(slot.place, error)
            self._last_failure = time.monotonic()
        if self._failures.failed(partition, error, None if gone else slot.node, n_nodes):
            self._queue.put_back(partition, failed=not gone)
            self.counts["retries"] += 1

    def _start_failed(self, node: str, error: Exception) -> None:
        """Delay the replacement, longer after each failure on the node. Raise if none is likely to become ready."""
        self._n_failed_starts += 1
        self._starts.failed(node, error)
        self._due.append(time.monotonic() + self._starts.back_off(node))
        n_workers = self.settings.n_workers if any(each.place for each in self._slots) else 1
        most = self.settings.compute.max_tries * n_workers
        is_likely = self._n_failed_starts < most and (self._slots or isinstance(error, WorkerLost))
        if self._any_ready or is_likely:
            return
        if isinstance(error, MixedNutsError):
            raise error
        raise ClusterError(f"no worker could start in {self._n_failed_starts} tries; the last one ended with: {error}")

    def _require_ready(self) -> None:
        """Raise ClusterError if no worker has been ready for `start_seconds`."""
        settings, compute = self.settings, self.settings.compute
        if self._ready():
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > compute.start_seconds:
            where = "".join(f", {name} {value}" for name, value in settings.placement.items())
            raise ClusterError(
                f"no worker was ready for {compute.start_seconds:g} s: {settings.n_workers} were requested, each with "
                f"{compute.num_cpus:g} CPUs and {settings.num_gpus:g} GPUs{where}; {self.executor.room()}. Change "
                "compute.num_workers, num_cpus or num_gpus to what it has, or raise compute.start_seconds"
            )

    def _kill_overdue(self) -> None:
        """Replace workers that take too long to load their classifiers or to compute a partition."""
        for slot in list(self._slots):
            taken, allowed = time.monotonic() - slot.since, math.inf
            if slot.method == "ready":
                allowed = self.settings.compute.start_seconds
            elif slot.partition is not None:
                # The partition may just be slow, so each further try has twice the time. The images of prefetched
                # partitions are attacked in the same batches, so they need time, too.
                at_most = self.task.n_passes * (slot.pass_seconds or math.inf)
                times = self.settings.compute.watchdog or math.inf
                allowed = self._queue.seconds_allowed(slot.partition, times, at_most)
                allowed *= 2.0 ** self._failures.tries(slot.partition) * (1 + slot.n_prefetched)
            if taken > allowed:
                what = f"not finished after {taken:.0f} s; at most {allowed:.0f} s are allowed"
                self._failed(slot, TimeoutError(what))

    def _end(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        slot.worker.end()
        self._queue.release(slot)

"""A pool of workers that pull pieces of work: lost workers are replaced, lost pieces are computed again.

A worker computes one piece at a time. With a lost worker go its piece, pieces that it had computed but could not write
because the storage did not answer, and what it had begun of its prefetched pieces. More workers may be requested than
the cluster has room for: an autoscaler sees the requests without room, and the workers join with the new nodes. The
driver holds counts and times, never images.

A piece that takes far longer than the finished ones suggest is computed a second time by another worker. Results are
deterministic and a file is created once, so the copy that is written first counts and the other's worker is ended.

Workers on a node that will leave (a spot machine that is called back, for instance) get no further piece. They finish
their piece; if the notice is too short for that, another worker begins the piece at once.
"""

import logging
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import ClusterError, MixedNutsError, StoreError
from ..storage.partitions import Partition, Span
from ..storage.records import Receipt
from ..storage.store import Store
from .executor import Executor, PoolSettings, Worker, WorkerLost
from .schedule import Failures, Merge, Work, WorkQueue
from .tasks import Task
from .worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 5.0  # the driver sleeps at most so long before it reports how many workers there are
_NOTICE_SECONDS = 1.0  # at least so long between two checks of which nodes are drained
_MOST_ASKED = 200  # more workers than this are not asked for their progress: some finish every few seconds anyway


@dataclass(eq=False)
class _Hired:
    worker: Worker
    node: str = ""  # what its `ready` has returned
    work: Work | None = None  # what it computes,
    since: float = 0.0  # and from when on, by time.monotonic()
    prefetched: tuple[Partition, ...] = ()  # pieces that it gets next and may have begun
    unwritten: list[Partition] = field(default_factory=list)  # computed, and not in the storage yet
    question: "Future[float] | None" = None  # the open call for the number of decided images of `work`
    decided: float = 0.0  # the last answer to it


@dataclass
class Pool:
    """Runs one task over a queue of pieces."""

    spec: WorkerSpec
    task: Task
    settings: PoolSettings
    executor: Executor
    on_receipt: Callable[[Receipt], None] = lambda _receipt: None  # one more piece is written
    on_file: Callable[[Receipt], None] = lambda _receipt: None  # a partition's whole file is written
    on_look: Callable[[int, int], None] = lambda _ready, _asked: None  # numbers of ready and of requested workers
    on_decided: Callable[[float], None] | None = None  # the number of decided images of unfinished pieces
    _ended: "queue.SimpleQueue[Future[Any]]" = field(default_factory=queue.SimpleQueue)  # calls, as they end
    _running: "dict[Future[Any], _Hired]" = field(default_factory=dict)  # open call -> its worker
    _hired: list[_Hired] = field(default_factory=list)  # all workers that are not released
    _written: set[Work] = field(default_factory=set)
    _twice: set[Work] = field(default_factory=set)  # pieces that two workers may compute
    _leaving: dict[str, float] = field(default_factory=dict)  # nodes that are drained -> until when, by time.time()
    _failed_starts: int = 0
    _any_ready: bool = False

    def run(self, queue: WorkQueue) -> None:
        """Returns when each piece is written or set aside.

        Raises:
            PartitionFailed: after all others are done, naming the pieces that failed all of their tries; at once, where
                every try so far has failed.
            ClusterError: at once, where a worker cannot start; a worker's own MixedNutsError is passed on as it is.
            StoreError: at once, where a worker could not read or write the storage.
        """
        self._queue = queue
        self._failures = Failures(Store(self.spec.store_uri), self.task.stage, self.settings.max_tries)
        for _ in range(min(self.settings.n_workers, queue.most_pieces())):
            self._hire()
        try:
            looked, noticed, started = 0.0, 0.0, time.monotonic()
            while len(queue) or any(self._needed(worker) for worker in self._running.values()):
                if time.monotonic() - noticed > min(_NOTICE_SECONDS, _LOOK_UP_SECONDS):
                    noticed = time.monotonic()
                    self._look_for_leaving()
                for call in self._wait():
                    self._settle(call)
                if not self._any_ready and time.monotonic() - started > self.settings.start_seconds:
                    raise ClusterError(self._none_came())
                if time.monotonic() - looked > _LOOK_UP_SECONDS:
                    looked = time.monotonic()
                    self._look_for_overdue(looked)
                    self.on_look(sum(bool(worker.node) for worker in self._running.values()), len(self._running))
                    self._ask_how_far()
        finally:
            for worker in list(self._hired):
                self._end(worker)
            self._running.clear()
        self._failures.raise_if_poisoned()

    def _needed(self, worker: _Hired) -> bool:
        """Whether its piece, or one that it holds, is not written yet."""
        return any(piece not in self._written for piece in (*worker.unwritten, *([worker.work] if worker.work else [])))

    def _look_for_overdue(self, now: float) -> None:
        """Have overdue pieces computed a second time, and end a worker that has taken twice the time allowed."""
        for call, worker in list(self._running.items()):
            work = worker.work
            if work is None or call not in self._running:
                continue
            taken, allowed = now - worker.since, self._queue.seconds_allowed(work, self.settings.watchdog)
            allowed *= 2 ** self._failures.tries(work)  # the piece may just be slow: each try has twice the time
            allowed *= 1 + len(worker.prefetched)  # the worker computes those in the same batches
            if taken > 2 * allowed:
                self._end_hung(call, worker, work, taken)
            elif taken > allowed and work not in self._twice:
                self._begin_again(work, f"{taken:.0f} s are more than the {allowed:.0f} s expected")

    def _look_for_leaving(self) -> None:
        """Note which nodes are drained, and have another worker begin the pieces that they cannot finish in time."""
        draining, known = self.executor.leaving(), self._leaving.keys()
        for worker in [worker for worker in self._hired if worker.node in draining.keys() - known]:
            work, left = worker.work, draining[worker.node] - time.time()
            logger.warning("node %s is drained (%.0f s left): it gets no further piece", worker.node, left)
            self._leaving[worker.node] = draining[worker.node]
            self._queue.release(worker)
            expected = self._queue.seconds_expected(work) - (time.monotonic() - worker.since) if work else 0.0
            if work and expected > left and work not in self._twice:
                self._begin_again(work, f"its node leaves in {left:.0f} s")
            elif len(self._queue):
                self._hire_if_missing()
        self._leaving = {node: until for node, until in self._leaving.items() if node in draining}

    def _begin_again(self, work: Work, why: str) -> None:
        """Let a second worker compute the piece too."""
        logger.warning("%s: %s; it is begun again", work, why)
        self._twice.add(work)
        self._queue.hand_out_again(work)
        self.executor.count_retry(self.spec.run_id, self.task.stage)
        self._hire_if_missing()

    def _hire_if_missing(self) -> None:
        """Hire a worker in place of one that was released or will leave; without room the request waits."""
        if sum(worker.node not in self._leaving for worker in self._hired) < self.settings.n_workers:
            self._hire()

    def _end_hung(self, call: "Future[Any]", worker: _Hired, work: Work, taken: float) -> None:
        reason = f"hung: nothing came of it for {taken:.0f} s"
        self._end_at_once(call, worker)
        if self._failures.failed(work, reason, f"{reason}, on node {worker.node}", worker.node):
            self._try_again(work)
        else:
            self._queue.forget_copy(work)
        self._raise_if_hopeless()
        if len(self._queue):
            self._hire_if_missing()

    def _end_at_once(self, call: "Future[Any]", worker: _Hired) -> None:
        """End a worker in the middle of a call; its computed but unwritten pieces are computed again."""
        del self._running[call]
        self._end(worker)
        for piece in worker.unwritten:
            if piece not in self._written:
                self._try_again(piece)

    def _wait(self) -> "list[Future[Any]]":
        """All calls that have ended by now, after waiting for the first one."""
        try:
            ended = [self._ended.get(timeout=_LOOK_UP_SECONDS)]
        except queue.Empty:
            return []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def _ask_how_far(self) -> None:
        """Report how many images the workers have decided by their last answers, and ask them again."""
        at_work = [worker for worker in self._running.values() if worker.work]
        if self.on_decided is None or len(at_work) > _MOST_ASKED:
            return
        for worker in at_work:
            if worker.question is not None and worker.question.done():
                if worker.question.exception() is None:  # that a worker is lost is seen when its piece is settled
                    worker.decided = worker.question.result()
                worker.question = None
            if worker.question is None:
                worker.question = worker.worker.call("decided")
        self.on_decided(sum(worker.decided for worker in at_work))

    def _none_came(self) -> str:
        settings = self.settings
        where = "".join(f", {name} {value}" for name, value in settings.placement.items())
        return (
            f"no worker was ready within {settings.start_seconds:g} s: {settings.n_workers} were asked for, each with "
            f"{settings.num_cpus:g} CPUs and {settings.num_gpus:g} GPUs{where}; {self.executor.room()}. Change "
            "compute.num_workers, num_cpus or num_gpus to what it has, or raise compute.start_seconds"
        )

    def _hire(self) -> None:
        """Ask for an actor; it joins when the cluster has room."""
        worker = _Hired(self.executor.hire(self.spec, self.settings))
        self._hired.append(worker)
        self._begin(worker, "ready")

    def _begin(self, worker: _Hired, method: str, *arguments: Any) -> None:
        call = worker.worker.call(method, *arguments)
        self._running[call] = worker
        call.add_done_callback(self._ended.put)

    def _release(self, worker: _Hired) -> None:
        """Give back a worker that computes nothing and gets nothing more."""
        self._forget(worker)
        self.executor.release(self.spec, self.settings, worker.worker)

    def _end(self, worker: _Hired) -> None:
        """End a worker at once, also in the middle of a call."""
        self._forget(worker)
        worker.worker.end()

    def _forget(self, worker: _Hired) -> None:
        self._hired.remove(worker)
        self._queue.release(worker)

    def _settle(self, call: "Future[Any]") -> None:
        """Take in one result, good or bad, and give the worker its next piece."""
        worker = self._running.pop(call, None)
        if worker is None:
            return  # it was ended because the other copy of its piece was written first
        work, worker.work = worker.work, None
        try:
            result = call.result()
        except WorkerLost as error:
            self._worker_lost(worker, work, error)
        except Exception as error:
            self._call_failed(worker, work, error)
        else:
            if not worker.node:
                worker.node, self._any_ready = result, True
                logger.info("%s: a worker is ready", self.task.stage, extra={"node": result, **self.settings.placement})
            elif isinstance(work, Merge):
                if self._first(work):
                    self._queue.finished(work)
                    self.on_file(result)
            else:
                self._take_in(worker, work, result)
            self._assign(worker)

    def _take_in(self, worker: _Hired, work: Partition | None, written: Mapping[Partition, Receipt]) -> None:
        """Note that a worker has computed `work` and that the storage has accepted the files `written`."""
        if work:
            self._failures.succeeded()
            worker.unwritten.append(work)
        worker.unwritten = [piece for piece in worker.unwritten if piece not in written]
        for piece, receipt in written.items():
            if not self._first(piece):
                continue
            self._queue.finished(piece, seconds=receipt.seconds, n_forward=receipt.n_forward, machine=worker.node)
            self.on_receipt(receipt)
            if not isinstance(piece, Span):
                self.on_file(receipt)

    def _first(self, work: Work) -> bool:
        """Note that a piece is written, and end a worker that computes a copy of it; False for a second copy."""
        if work in self._written:
            return False
        self._written.add(work)
        if work in self._twice:
            for call, other in list(self._running.items()):
                if other.work == work:
                    self._end_at_once(call, other)
                    if len(self._queue):
                        self._hire()
        return True

    def _assign(self, worker: _Hired) -> None:
        n_workers = len(self._running) + 1
        work = None if worker.node in self._leaving else self._queue.take(n_workers, worker)
        worker.question, worker.decided = None, 0.0
        if work is None and worker.unwritten:
            self._begin(worker, "flush")
            return
        if work is None:
            self._release(worker)
            if len(self._queue):  # the worker got nothing because its node leaves
                self._hire_if_missing()
            return
        worker.work, worker.since = work, time.monotonic()
        if isinstance(work, Merge):
            self._begin(worker, "merge", work.whole, work.spans, self.task)
        else:
            worker.prefetched = self._queue.prefetch(n_workers, worker, work)
            self._begin(worker, "process", work, self.task, worker.prefetched)

    def _call_failed(self, worker: _Hired, work: Work | None, error: Exception) -> None:
        if not worker.node:
            raise error if isinstance(error, MixedNutsError) else ClusterError(f"a worker cannot start: {error}")
        if work in self._written:  # the other copy of this piece was faster
            self._assign(worker)
            return
        if isinstance(error, StoreError) or work is None:
            raise error  # the worker has retried for as long as it makes sense, and every piece needs the storage
        if self._failures.failed(work, f"{type(error).__name__}: {error}", _log(error), worker.node):
            self._try_again(work)
        self._raise_if_hopeless()
        self._assign(worker)

    def _worker_lost(self, worker: _Hired, work: Work | None, error: WorkerLost) -> None:
        """The process or its machine is gone: its pieces go back into the queue, and a new worker is hired."""
        logger.warning("lost a worker%s: %s", f" at {work}" if work else "", _first_line(error))
        self._end(worker)
        gone, log = error.machine or self.executor.is_gone(worker.node), _log(error)
        if not worker.node:
            self._failed_starts += not gone
            if self._failed_starts >= self.settings.max_tries * self.settings.n_workers:
                raise ClusterError(f"workers died {self._failed_starts} times before they were ready: {error}")
        # A failure is counted for the piece it computed or, if it only waited for the storage, for its unwritten ones.
        unwritten = [piece for piece in worker.unwritten if piece not in self._written]
        blamed: list[Work] = [piece for piece in ([work] if work else unwritten) if piece not in self._written]
        for piece in unwritten:
            if piece not in blamed:
                self._try_again(piece)
        for blame in blamed:
            if gone or work is None:
                again = self._failures.machine_lost(blame, _first_line(error), log)
            else:
                again = self._failures.failed(blame, f"the worker died: {_first_line(error)}", log, worker.node)
            if again:
                self._try_again(blame)
        self._raise_if_hopeless()
        if len(self._queue):
            self._hire()

    def _raise_if_hopeless(self) -> None:
        self._failures.raise_if_hopeless({worker.node for worker in self._running.values() if worker.work})

    def _try_again(self, work: Work) -> None:
        if any(other.work == work for other in self._running.values()):
            return  # another worker still computes a copy
        self._queue.put_back(work)
        self.executor.count_retry(self.spec.run_id, self.task.stage)


def _log(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

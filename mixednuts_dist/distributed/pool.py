"""A pool of worker actors that pull pieces of work: lost workers are replaced, lost work is done again.

Each actor works on one piece, so a lost one costs one piece, those few that a silent storage kept it from writing, and
what was begun of the next ones, whose images take the seats that empty. More actors may be
asked for than there is room: they wait, which is what an autoscaler listens to, and join when a node does. The driver
holds numbers, never images.

A piece that takes far longer than the finished ones let expect is computed a second time elsewhere. Results are
deterministic and a file is created once, so whichever copy is written first counts, and the other's worker is ended.

The workers of a node that Ray drains, because a spot machine is called back for instance, get no further piece. What
they are at they finish; where the notice is shorter than that takes, another worker begins it at once.
"""

import contextlib
import logging
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ..errors import ClusterError, MixedNutsError, StoreError
from ..storage.partitions import Partition, Span
from ..storage.records import Receipt
from ..storage.store import Store
from .metrics import RunMetrics
from .schedule import Failures, Merge, Work, WorkQueue
from .tasks import Task
from .worker import AttackActor, AttackWorker, PassSeconds
from .worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

_LOOK_UP_SECONDS = 5.0  # how long the driver sleeps at most before it tells who is at work
_NOTICE_SECONDS = 1.0  # between two looks at which nodes are drained, as pieces end
_MOST_ASKED = 200  # workers, for how far they are; of more of them, some finish every few seconds


@dataclass(frozen=True)
class PoolSettings:
    """How many actors, what each one reserves, and how often a piece may fail."""

    n_workers: int
    num_cpus: float
    num_gpus: float
    max_tries: int = 3
    start_seconds: float = math.inf  # how long all workers together may keep the stage waiting for the first one
    placement: Mapping[str, Any] = field(default_factory=dict)  # further options of the actors: where they may run
    watchdog: float = math.inf  # a piece may take so many times what the slowest finished one lets expect


@dataclass(eq=False)
class _Worker:
    actor: Any
    node: str = ""  # its Ray node id, known once it is ready
    work: Work | None = None  # what it is at,
    since: float = 0.0  # and from when on, by time.monotonic()
    ahead: tuple[Partition, ...] = ()  # pieces that it may have begun meanwhile
    unwritten: list[Partition] = field(default_factory=list)  # computed, and waiting for the storage
    asked: Any = None  # a question that is not answered yet: how many images of `work` are decided
    decided: float = 0.0  # the last answer


@dataclass
class Pool:
    """Runs one task over a queue of pieces."""

    spec: WorkerSpec
    task: Task
    settings: PoolSettings
    on_receipt: Callable[[Receipt], None] = lambda _receipt: None  # one more piece is written
    on_file: Callable[[Receipt], None] = lambda _receipt: None  # a partition's whole file is written
    on_look: Callable[[int, int], None] = lambda _ready, _asked: None  # workers that are there, and that were asked for
    on_decided: Callable[[float], None] | None = None  # images of unfinished pieces that are decided
    _running: dict[Any, _Worker] = field(default_factory=dict)  # the task that each worker is at -> the worker
    _hired: list[_Worker] = field(default_factory=list)  # all that are not released yet, whatever they are at
    _written: set[Work] = field(default_factory=set)
    _twice: set[Work] = field(default_factory=set)  # overdue pieces, which a second worker may have or get
    _leaving: dict[str, float] = field(default_factory=dict)  # nodes that are drained -> until when, by time.time()
    _failed_starts: int = 0
    _any_ready: bool = False

    def run(self, queue: WorkQueue) -> None:
        """Until each piece is written or set aside.

        Raises:
            PartitionFailed: after all others are done, naming those that failed all of their tries; at once, where the
                first few failed and none was done.
            ClusterError: at once, where a worker cannot start; a worker's own MixedNutsError is passed on as it is.
            StoreError: at once, where the storage has failed a worker.
        """
        self._queue = queue
        self._failures = Failures(Store(self.spec.store_uri), self.task.stage, self.settings.max_tries)
        self._metrics = RunMetrics(self.spec.run_id)
        for _ in range(min(self.settings.n_workers, queue.most_pieces())):
            self._hire()
        try:
            looked, noticed, started = 0.0, 0.0, time.monotonic()
            while len(queue) or any(self._needed(worker) for worker in self._running.values()):
                if time.monotonic() - noticed > min(_NOTICE_SECONDS, _LOOK_UP_SECONDS):
                    noticed = time.monotonic()
                    self._look_for_leaving()
                for ref in self._wait():
                    self._settle(ref)
                if not self._any_ready and time.monotonic() - started > self.settings.start_seconds:
                    raise ClusterError(self._nobody_came())
                if time.monotonic() - looked > _LOOK_UP_SECONDS:
                    looked = time.monotonic()
                    self._look_for_overdue(looked)
                    self.on_look(sum(bool(worker.node) for worker in self._running.values()), len(self._running))
                    self._ask_how_far()
        finally:
            self._dismiss()
        self._failures.raise_if_poisoned()

    def _needed(self, worker: _Worker) -> bool:
        """Whether anything that it has or is at is not written yet."""
        return any(piece not in self._written for piece in (*worker.unwritten, *([worker.work] if worker.work else [])))

    def _look_for_overdue(self, now: float) -> None:
        """Hand out overdue pieces again; where twice the time has not helped either, end the worker as hung."""
        for ref, worker in list(self._running.items()):
            work = worker.work
            if work is None or ref not in self._running:
                continue
            taken, allowed = now - worker.since, self._queue.seconds_allowed(work, self.settings.watchdog)
            allowed *= 2 ** self._failures.tries(work)  # it may be slow by nature: each try has twice the time
            allowed *= 1 + len(worker.ahead)  # whose passes are among its own
            if taken > 2 * allowed:
                self._end_hung(ref, worker, work, taken)
            elif taken > allowed and work not in self._twice:
                self._begin_again(work, f"{taken:.0f} s are more than the {allowed:.0f} s expected")

    def _look_for_leaving(self) -> None:
        """Note the nodes that are drained, and begin elsewhere what they have no time to finish."""
        draining, known = draining_nodes(), self._leaving.keys()
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
        """Let another worker compute it too."""
        logger.warning("%s: %s; it is begun again", work, why)
        self._twice.add(work)
        self._queue.hand_out_again(work)
        self._metrics.count_retry(self.task.stage)
        self._hire_if_missing()

    def _hire_if_missing(self) -> None:
        """In the place of one that was released or will leave; where there is no room, it waits."""
        if sum(worker.node not in self._leaving for worker in self._hired) < self.settings.n_workers:
            self._hire()

    def _end_hung(self, ref: Any, worker: _Worker, work: Work, taken: float) -> None:
        reason = f"hung: nothing came of it for {taken:.0f} s"
        self._end_at_once(ref, worker)
        if self._failures.failed(work, reason, f"{reason}, on node {worker.node}", worker.node):
            self._try_again(work)
        else:
            self._queue.forget_copy(work)
        self._raise_if_hopeless()
        if len(self._queue):
            self._hire_if_missing()

    def _end_at_once(self, ref: Any, worker: _Worker) -> None:
        """End a worker in the middle of what it is at; what only waited to be written is computed again."""
        del self._running[ref]
        self._release(worker)
        for piece in worker.unwritten:
            if piece not in self._written:
                self._try_again(piece)

    def _wait(self) -> list[Any]:
        """The tasks that have ended, all of them at once: with many workers looking is what costs."""
        refs = list(self._running)
        done, _ = ray.wait(refs, num_returns=1, timeout=_LOOK_UP_SECONDS, fetch_local=False)
        if done and len(refs) > 1:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(done)

    def _ask_how_far(self) -> None:
        """Tell what the workers at work have answered since the last look, and ask again."""
        at_work = [worker for worker in self._running.values() if worker.work]
        if self.on_decided is None or len(at_work) > _MOST_ASKED:
            return
        asked = [worker.asked for worker in at_work if worker.asked is not None]
        answered = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        for worker in at_work:
            if worker.asked in answered:
                with contextlib.suppress(RayError):  # a worker that is lost shows where its work is waited for
                    worker.decided = ray.get(worker.asked)
                worker.asked = None
            if worker.asked is None:
                worker.asked = worker.actor.decided.remote()
        self.on_decided(sum(worker.decided for worker in at_work))

    def _nobody_came(self) -> str:
        settings = self.settings
        has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        where = "".join(f", {name} {value}" for name, value in settings.placement.items())
        told = ", ".join(f"{has.get(name, 0):g} {name}s ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
        return (
            f"no worker was ready within {settings.start_seconds:g} s: {settings.n_workers} were asked for, each with "
            f"{settings.num_cpus:g} CPUs and {settings.num_gpus:g} GPUs{where}; the cluster has {told}. Change "
            "compute.num_workers, num_cpus or num_gpus to what it has, or raise compute.start_seconds"
        )

    def _hire(self) -> None:
        """Ask for an actor; it joins when the cluster has room."""
        worker = _Worker(self._new_actor())
        self._hired.append(worker)
        self._running[worker.actor.ready.remote()] = worker

    def _new_actor(self) -> Any:
        return AttackActor.options(
            num_cpus=self.settings.num_cpus, num_gpus=self.settings.num_gpus, max_restarts=0, max_task_retries=0,
            **self.settings.placement,
        ).remote(self.spec)  # fmt: skip

    def _release(self, worker: _Worker) -> None:
        """Give its room back to the cluster."""
        self._hired.remove(worker)
        self._queue.release(worker)
        self._end(worker.actor)

    def _end(self, actor: Any) -> None:
        ray.kill(actor)

    def _settle(self, ref: Any) -> None:
        """Take in one result, good or bad, and give the worker its next piece."""
        worker = self._running.pop(ref, None)
        if worker is None:
            return  # ended a moment ago, as the second at a piece
        work, worker.work = worker.work, None
        try:
            result = ray.get(ref)
        except RayTaskError as error:
            self._task_failed(worker, work, error)
        except RayError as error:
            self._worker_lost(worker, work, error)
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

    def _take_in(self, worker: _Worker, work: Partition | None, written: Mapping[Partition, Receipt]) -> None:
        """It has computed `work`, or waited for the storage; `written` are the files that have been accepted."""
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
        """Note that it is written; False for the second of two copies. A worker that is still at the other is ended."""
        if work in self._written:
            return False
        self._written.add(work)
        if work in self._twice:
            for ref, other in list(self._running.items()):
                if other.work == work:
                    self._end_at_once(ref, other)
                    if len(self._queue):
                        self._hire()
        return True

    def _assign(self, worker: _Worker) -> None:
        n_workers = len(self._running) + 1
        work = None if worker.node in self._leaving else self._queue.take(n_workers, worker)
        worker.asked, worker.decided = None, 0.0
        if work is None and worker.unwritten:
            self._running[worker.actor.flush.remote()] = worker
            return
        if work is None:
            self._release(worker)
            if len(self._queue):  # it leaves with its node
                self._hire_if_missing()
            return
        worker.work, worker.since = work, time.monotonic()
        if isinstance(work, Merge):
            self._running[worker.actor.merge.remote(work.whole, work.spans, self.task)] = worker
        else:
            worker.ahead = self._queue.claim(n_workers, worker, work)
            self._running[worker.actor.process.remote(work, self.task, worker.ahead)] = worker

    def _task_failed(self, worker: _Worker, work: Work | None, error: RayTaskError) -> None:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if not worker.node:
            raise cause if isinstance(cause, MixedNutsError) else ClusterError(f"a worker cannot start: {error}")
        if work in self._written:  # a copy, which the other has overtaken
            self._assign(worker)
            return
        if isinstance(cause, StoreError) or work is None:
            raise cause  # the worker has waited as long as waiting helps, and every other piece needs the storage too
        if self._failures.failed(work, f"{type(cause).__name__}: {cause}", str(error), worker.node):
            self._try_again(work)
        self._raise_if_hopeless()
        self._assign(worker)

    def _worker_lost(self, worker: _Worker, work: Work | None, error: RayError) -> None:
        """The process or its machine is gone: the piece goes back to the queue and a new actor is asked for."""
        logger.warning("lost a worker%s: %s", f" at {work}" if work else "", _first_line(error))
        self._release(worker)
        gone = _machine_is_gone(worker, error)
        log = "".join(traceback.format_exception(error))
        if not worker.node:
            self._count_failed_start(gone, error)
        # What it was at is to blame; where it only waited for the storage, the pieces that waited with it are.
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
            return  # its copy goes on
        self._queue.put_back(work)
        self._metrics.count_retry(self.task.stage)

    def _count_failed_start(self, machine_is_gone: bool, error: RayError) -> None:
        self._failed_starts += not machine_is_gone
        if self._failed_starts >= self.settings.max_tries * self.settings.n_workers:
            raise ClusterError(f"workers died {self._failed_starts} times before they were ready: {error}")

    def _dismiss(self) -> None:
        """End every worker, also the one whose error ends the stage."""
        for worker in list(self._hired):
            self._release(worker)
        self._running.clear()


@dataclass
class LocalPool(Pool):
    """The same work in this process, without Ray, by one worker.

    There is no process to lose: what a piece raises uses up one of its tries, as in an actor, and an error of the
    storage ends the stage at once.
    """

    worker: AttackWorker = field(kw_only=True)

    def run(self, queue: WorkQueue) -> None:
        """Until each piece is written or set aside; errors as in `Pool.run`."""
        worker = self.worker
        worker.bench.on_decided = self.on_decided
        failures = Failures(Store(self.spec.store_uri), self.task.stage, self.settings.max_tries)
        while (work := queue.take(1, worker)) is not None:
            try:
                if isinstance(work, Merge):
                    self.on_file(worker.merge(work.whole, work.spans, self.task))
                    queue.finished(work)
                    continue
                with _signals_end_it_whole():
                    written = {**worker.process(work, self.task, queue.claim(1, worker, work)), **worker.flush()}
            except StoreError:
                raise
            except Exception as error:
                if failures.failed(work, f"{type(error).__name__}: {error}", traceback.format_exc()):
                    queue.put_back(work)
                failures.raise_if_hopeless({""})
                continue
            failures.succeeded()
            for piece, receipt in written.items():
                queue.finished(piece)
                self.on_receipt(receipt)
                if not isinstance(piece, Span):
                    self.on_file(receipt)
        failures.raise_if_poisoned()


class _SignalReceived(BaseException):
    """Ctrl-C or SIGTERM in the middle of a piece; the attacks would answer a KeyboardInterrupt with what they have."""


@contextlib.contextmanager
def _signals_end_it_whole() -> Iterator[None]:
    """In here a signal ends the piece without a file of half its work; then the usual handler is called.

    It is called whatever the signal came out as: a library may make an error of another kind of it, or nothing at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []
    at_work = True

    def receive(number: int, _: object) -> None:
        received.append(number)
        if at_work and len(received) == 1:
            raise _SignalReceived

    # The alarm raises an interrupt again that was swallowed before.
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGALRM] if hasattr(signal, "SIGALRM") else [])]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    except _SignalReceived:
        pass
    finally:
        at_work = False
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def draining_nodes() -> dict[str, float]:
    """Nodes that Ray was told will go -> when, in seconds since 1970, infinity where nobody said.

    Ray's public interface does not tell; this is where its own libraries ask. Where it is no more, a node that leaves
    is one that is lost.
    """
    try:
        from ray._private.state import state

        told: dict[str, int] = state.get_draining_nodes()
    except (ImportError, AttributeError, RayError, RuntimeError) as error:
        logger.debug("whether nodes are drained is not known: %s", error)
        return {}
    return {node: deadline / 1000 if deadline else math.inf for node, deadline in told.items()}


def _machine_is_gone(worker: _Worker, error: RayError) -> bool:
    """Whether the machine was lost, not just the process.

    A process that dies alone is reported as dead by its node at once. Where the whole machine goes, nobody reports: the
    connection breaks seconds before Ray declares the node dead.
    """
    if isinstance(error, ActorUnavailableError) or (isinstance(error, RayActorError) and error.preempted):
        return True
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return bool(worker.node) and worker.node not in alive


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def measure_on_one_worker(spec: WorkerSpec, settings: PoolSettings) -> dict[str, PassSeconds]:
    """Seconds a pass of "rob", and of "std" and "mixed" where there are, on one worker of the cluster; needs Ray."""
    resources = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    actor = AttackActor.options(**resources, **settings.placement).remote(spec)
    try:
        ray.get(actor.ready.remote())
        measured: dict[str, PassSeconds] = ray.get(actor.time_passes.remote())
    except RayTaskError as error:
        if isinstance(error.cause, MixedNutsError):
            raise error.cause from error
        raise ClusterError(f"a worker cannot start: {error}") from error
    finally:
        ray.kill(actor)
    return measured

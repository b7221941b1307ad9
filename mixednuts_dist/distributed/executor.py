"""Where the pieces of a run are computed: an executor, chosen by name (`compute.executor`) from a register.

Another one is one file, in this room or named by the configuration's `extensions`: a class with `workers`, which says
how many workers there are to be, and `begin`, which starts one. What is computed, in which order, how often it is tried
and what a lost worker costs is the business of `pool.py`, the same for all of them.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from ..config.compute_config import ComputeConfig
from ..config.register import EXECUTORS
from ..errors import ClusterError, MixedNutsError
from ..selection.criteria import Scores
from ..selection.grid import Grid
from .search_inputs import SearchInputs, SearchTask
from .worker import PassSeconds
from .worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

Scoring = Callable[[Sequence[Grid]], list[Scores]]


@dataclass(frozen=True)
class PoolSettings:
    """How many workers, what each one reserves, and how often a piece may fail."""

    n_workers: int
    num_cpus: float
    num_gpus: float
    max_tries: int = 3
    start_seconds: float = math.inf  # how long all workers together may keep the stage waiting for the first one
    placement: Mapping[str, Any] = field(default_factory=dict)  # where workers may run, in the executor's own terms
    watchdog: float = math.inf  # times the duration that the slowest finished partition suggests

    @classmethod
    def of(cls, compute: ComputeConfig, n_workers: int, num_gpus: float, **options: Any) -> Self:
        """As configured, for so many workers."""
        return cls(
            n_workers, compute.num_cpus, num_gpus, compute.max_tries, compute.start_seconds,
            watchdog=compute.watchdog or math.inf, **options,
        )  # fmt: skip


class WorkerLost(Exception):
    """A worker's process is gone, or (`machine`) its machine, which does not count as a failed try of its piece."""

    def __init__(self, reason: str, *, machine: bool = False) -> None:
        super().__init__(reason)
        self.machine = machine


class Worker(Protocol):
    """An `AttackWorker` in some process."""

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Begin one of its methods; the future raises what the method raised, or `WorkerLost`."""

    def end(self) -> None:
        """Kill the worker immediately; open calls may never complete."""


class Executor:
    """One for a whole command: all its stages use it, one after the other.

    Nothing is started before a stage has work, so that a run that is done starts nothing.

    Args:
        address: of a cluster, for executors that have one.
    """

    keeps_workers = True  # from one stage to the next, with their classifiers loaded, while `executing` is open

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self.report: Callable[[str], None] = logger.info  # called before what takes a while
        self.n_users = 0  # open blocks of `executing`
        self._idle: list[tuple[WorkerSpec, PoolSettings, Worker]] = []

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """How many workers, and what each one reserves; starts what they need."""
        raise NotImplementedError

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> Worker:
        """A new worker; returns at once, where there is no room yet too."""
        raise NotImplementedError

    def start(self) -> None:
        """Connect or start, unless that is done."""

    def close(self) -> None:
        """Disconnect, or stop what `start` has started."""

    def is_gone(self, node: str) -> bool:  # noqa: ARG002
        """Whether a machine that was there has left."""
        return False

    def room(self) -> str:
        """What there is to compute on, for messages."""
        return "this machine"

    def export(self, run_id: str, stage: str, values: Mapping[str, float]) -> None:
        """Export a stage's metrics, if the executor has a place for them; `values` as in `metrics.DESCRIPTIONS`."""

    def scoring(self, inputs: SearchInputs, task: SearchTask, compute: ComputeConfig) -> Scoring | None:  # noqa: ARG002
        """Return a function that scores grids in parallel, or None to score them in this process."""
        return None

    def is_kept(self, spec: WorkerSpec, settings: PoolSettings) -> bool:
        """Whether `hire` would return a worker of an earlier stage, which may have died meanwhile."""
        return any(kept[:2] == (spec, settings) for kept in self._idle)

    def hire(self, spec: WorkerSpec, settings: PoolSettings) -> Worker:
        """A worker that an earlier stage has released, or a new one."""
        for kept in self._idle:
            if kept[:2] == (spec, settings):
                self._idle.remove(kept)
                return kept[2]
        self.end_idle()  # they may hold what the new one needs
        return self.begin(spec, settings)

    def release(self, spec: WorkerSpec, settings: PoolSettings, worker: Worker) -> None:
        """Take back a worker that is at nothing."""
        if self.keeps_workers and self.n_users:
            self._idle.append((spec, settings, worker))
        else:
            worker.end()

    def end_idle(self) -> None:
        """End the workers that are kept."""
        while self._idle:
            self._idle.pop()[2].end()

    def time_passes(self, spec: WorkerSpec, settings: PoolSettings) -> dict[str, PassSeconds]:
        """Seconds a pass of "rob", and of "std" and "mixed" where there are, on one worker.

        Raises:
            ClusterError: where a worker cannot start; its own MixedNutsError is passed on as it is.
        """
        worker = self.hire(spec, settings)
        try:
            worker.call("ready").result()
            measured: dict[str, PassSeconds] = worker.call("time_passes").result()
        except MixedNutsError:
            raise
        except Exception as error:
            raise ClusterError(f"a worker cannot start: {error}") from error
        finally:
            worker.end()
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_idle()
        self.close()


def make_executor(name: str, address: str | None = None) -> Executor:
    """The executor of that name; nothing is started yet."""
    made: Executor = EXECUTORS.get(name)(address)
    return made


@contextmanager
def executing(given: Executor | None, compute: ComputeConfig) -> Iterator[Executor]:
    """The caller's executor, or the configured one, which ends with the block."""
    executor = given or make_executor(compute.executor)
    executor.n_users += 1
    try:
        yield executor
    finally:
        executor.n_users -= 1
        if not executor.n_users:
            executor.end_idle()
        if given is None:
            executor.close()

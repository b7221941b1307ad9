"""Executors start the workers that compute a run's partitions. `compute.executor` chooses one by name.

To add an executor, register a class with `workers` and `begin` in a file of this package or of the configuration's
`extensions`. The pool (`pool.py`) decides what each worker computes, and replaces lost workers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..config.keys import ComputeConfig
from ..config.register import EXECUTORS
from ..errors import ClusterError, MixedNutsError
from ..selection.criteria import Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
from .worker_spec import PassSeconds, WorkerSpec

logger = logging.getLogger(__name__)

Scoring = Callable[[Grid], Scores]


@dataclass(frozen=True)
class PoolSettings:
    """The number of workers and their resources."""

    compute: ComputeConfig
    n_workers: int
    num_gpus: float  # per worker

    @property
    def placement(self) -> dict[str, Any]:
        """Return the configured keys that restrict where workers may run, which are options of Ray's actors."""
        keys = self.compute.model_dump(include={"accelerator_type", "label_selector", "fallback_strategy"})
        return {name: value for name, value in keys.items() if value}


class WorkerLost(Exception):
    """A worker's process or, with `machine`, its machine is gone. A lost machine does not count as a failed try."""

    def __init__(self, reason: str, *, machine: bool = False) -> None:
        super().__init__(reason)
        self.machine = machine


class Worker(Protocol):
    """The driver's handle of an `AttackWorker`, which runs in this or in another process."""

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the `AttackWorker`; the future raises the method's exception, or `WorkerLost`."""

    def end(self) -> None:
        """Kill the worker immediately. Futures of unfinished calls may never complete."""


class Executor:
    """Starts workers for all stages of a command, one stage after the other. Nothing starts before it is needed.

    Args:
        address: the cluster's address, for executors that have one.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or ""
        self.report: Callable[[str], None] = logger.info  # called with a message before slow operations
        self.n_users = 0  # number of `executing` blocks that use this executor now
        self._idle: list[tuple[WorkerSpec, PoolSettings, Worker]] = []  # kept from one stage to the next

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """Return the number of workers and their resources, after starting what they need."""
        raise NotImplementedError

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> Worker:
        """Return a new worker at once, even if it has to wait for resources."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect from a cluster, or stop what `workers` has started for all workers."""

    def is_gone(self, node: str) -> bool:  # noqa: ARG002
        """Whether a node has left the cluster."""
        return False

    def room(self) -> str:
        """Describe the available resources, for messages."""
        return "this machine"

    def export(self, run_id: str, stage: str, values: Mapping[str, float]) -> None:
        """Export a stage's metrics, if the executor supports metrics."""

    def scoring(self, spec: WorkerSpec, compute: ComputeConfig, rows: CachedLogits, criterion: str) -> Scoring | None:  # noqa: ARG002
        """Return a function that scores a grid by a criterion in parallel, or None to score it in this process."""
        return None

    def kept(self, spec: WorkerSpec, settings: PoolSettings) -> Worker | None:
        """Return an idle worker of an earlier stage, which may have died meanwhile. If none fits, end all idle ones."""
        for idle in self._idle:
            if idle[:2] == (spec, settings):
                self._idle.remove(idle)
                return idle[2]
        self.end_idle()  # they may hold the resources that a new worker needs
        return None

    def release(self, spec: WorkerSpec, settings: PoolSettings, worker: Worker) -> None:
        """Keep an idle worker with its classifiers for the next stage."""
        self._idle.append((spec, settings, worker))

    def end_idle(self) -> None:
        """End the workers that are kept."""
        while self._idle:
            self._idle.pop()[2].end()

    def time_passes(self, spec: WorkerSpec, settings: PoolSettings) -> dict[str, PassSeconds]:
        """Return the seconds per pass of "rob" and, if the run has two classifiers, of "std" and "mixed".

        Raises:
            ClusterError: if a worker cannot start; its own MixedNutsError is passed on unchanged.
        """
        worker = self.kept(spec, settings) or self.begin(spec, settings)
        try:
            worker.call("ready").result()
            measured: dict[str, PassSeconds] = worker.call("time_passes").result()
            return measured
        except MixedNutsError:
            raise
        except Exception as error:
            raise ClusterError(f"a worker cannot start: {error}") from error
        finally:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end_idle()
        self.close()


def make_executor(name: str, address: str | None = None) -> Executor:
    """Return the executor of that name, which has not started anything."""
    made: Executor = EXECUTORS.get(name)(address)
    return made


@contextmanager
def executing(given: Executor | None, compute: ComputeConfig) -> Iterator[Executor]:
    """Yield the caller's executor, or the configured one, which ends with the block."""
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

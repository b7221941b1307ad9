"""Where the pieces of a run are computed: an executor, chosen by name (`compute.executor`) from a register.

Another one is one file, in this room or named by the configuration's `extensions`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from ..config import ComputeConfig
from ..register import EXECUTORS
from ..selection.criteria import Scores
from ..selection.grid import Grid
from .slabs import SearchInputs, SearchTask
from .tasks import Task
from .worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

Scoring = Callable[[Sequence[Grid]], list[Scores]]


class Executor:
    """One for a whole command: all its stages use it, one after the other.

    Nothing is started before the first `start`, so that a run with nothing to do starts nothing.
    """

    cuts_partitions = True  # whether a partition may be cut into spans, so that no worker idles at a stage's end

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self.report: Callable[[str], None] = logger.info  # called before what takes a while

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect or start, unless that is done."""

    def close(self) -> None:
        """Disconnect, or stop what `start` has started."""

    def pool(self, spec: WorkerSpec, task: Task, compute: ComputeConfig) -> Any:
        """Workers for one task; its `run(queue)` returns once each piece is written or set aside."""
        raise NotImplementedError

    def workers(self, compute: ComputeConfig) -> Any:
        """How many workers, and what each one reserves."""
        raise NotImplementedError

    def time_passes(self, spec: WorkerSpec, workers: Any) -> dict[str, Any]:
        """Seconds a pass of "rob", and of "std" and "mixed" where there are, on one worker."""
        raise NotImplementedError

    def scoring(self, inputs: SearchInputs, task: SearchTask) -> Scoring | None:
        """Scores grids on many workers; None where that is not worth more than scoring them in this process."""


def make_executor(name: str, address: str | None = None) -> Executor:
    """The executor of that name; nothing is started yet."""
    made: Executor = EXECUTORS.get(name)(address)
    return made


@contextmanager
def executing(given: Executor | None, compute: ComputeConfig) -> Iterator[Executor]:
    """The caller's executor, or the configured one, which ends with the block."""
    if given is not None:
        yield given
        return
    with make_executor(compute.executor) as own:
        yield own

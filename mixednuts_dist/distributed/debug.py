"""One worker in the driver's own thread: breakpoints work, and exceptions are raised unchanged with their traceback."""

from concurrent.futures import Future
from typing import Any

import torch

from ..config.keys import ComputeConfig
from ..config.register import EXECUTORS
from .executor import Executor, PoolSettings
from .worker import AttackWorker
from .worker_spec import WorkerSpec


@EXECUTORS("debug", describes="the thread of the command, for breakpoints", order=2)
class DebugExecutor(Executor):
    """Completes each call before `call` returns."""

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """Return one worker, with a GPU if there is one."""
        return PoolSettings(compute, 1, float(torch.cuda.device_count() > 0))

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> "_Here":
        return _Here(spec, settings.num_gpus)


class _Here(AttackWorker):
    """A worker that is its own handle."""

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Return the result; an exception of the method is raised here."""
        future = Future[Any]()
        try:
            future.set_result(getattr(self, method)(*arguments))
        except SystemExit as error:  # would end the command without a message
            raise RuntimeError(f"sys.exit({error.code!r}) was called in {method}") from error
        return future

    def end(self) -> None:
        """Do nothing, because there is no process."""

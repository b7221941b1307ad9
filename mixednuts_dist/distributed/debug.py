"""One worker in the driver's own thread: breakpoints work, and exceptions surface unchanged with their traceback."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from ..config.compute_config import ComputeConfig
from ..config.register import EXECUTORS
from .executor import Executor, PoolSettings
from .worker import AttackWorker
from .worker_spec import WorkerSpec


@EXECUTORS("debug", describes="the thread of the command, for breakpoints", order=2)
class DebugExecutor(Executor):
    """Completes each call before `call` returns."""

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """Return one worker, with a GPU if there is one."""
        return PoolSettings.of(compute, 1, float(torch.cuda.device_count() > 0))

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> "_Here":
        """Return a worker in this thread."""
        return _Here(AttackWorker(spec, settings.num_gpus))


class _Here:
    def __init__(self, worker: AttackWorker) -> None:
        self._worker = worker

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Return the result; an exception of the method is raised here."""
        future, own = Future[Any](), os.getpid()
        with _delayed_signals():
            try:
                future.set_result(getattr(self._worker, method)(*arguments))
            except SystemExit as error:  # it would end the command without a message
                raise RuntimeError(f"sys.exit({error.code!r}) was called in {method}") from error
            finally:
                if os.getpid() != own:  # a classifier has forked this process
                    os._exit(0)
        return future

    def end(self) -> None:
        """Do nothing, because there is no process."""


class _SignalReceived(BaseException):
    """Ends a partition after Ctrl-C or SIGTERM. After a KeyboardInterrupt the attacks would return partial results."""


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """End the block at the first signal, then call the signal's usual handler.

    The handler is called even if a library has converted or swallowed the exception.
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

    # SIGALRM raises an interrupt again that was swallowed before. Ignored signals, such as SIGHUP under nohup, remain
    # ignored.
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM]
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in handled}
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

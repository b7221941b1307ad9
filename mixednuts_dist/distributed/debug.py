"""One worker in the driver's own thread: breakpoints work, and an exception surfaces as it is, with its traceback."""

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
    """Each call is done before `call` returns."""

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """One, with the GPU that there is."""
        return PoolSettings.of(compute, 1, float(torch.cuda.device_count() > 0))

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> "_Here":
        """An object."""
        return _Here(AttackWorker(spec, settings.num_gpus))


class _Here:
    def __init__(self, worker: AttackWorker) -> None:
        self._worker = worker

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """The answer; what the method raises is raised here."""
        future, own = Future[Any](), os.getpid()
        with _signals_end_it_whole():
            try:
                future.set_result(getattr(self._worker, method)(*arguments))
            except SystemExit as error:  # it would end the command without a word
                raise RuntimeError(f"sys.exit({error.code!r}) was called in {method}") from error
            finally:
                if os.getpid() != own:  # a child that a classifier has forked, which came back from it
                    os._exit(0)
        return future

    def end(self) -> None:
        """There is no process to end."""


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

    # The alarm raises an interrupt again that was swallowed before. What is ignored, as SIGHUP under nohup, stays so.
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {
        number: signal.signal(number, receive) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
    }
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

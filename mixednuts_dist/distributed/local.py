"""Worker processes on this machine, without Ray: one per GPU or, without GPUs, one per `compute.num_cpus` cores.

The driver sends each call through a pipe as a pickled (method, arguments), and receives (value, error, traceback). The
output of classifiers goes to the process's log, and the message about a lost worker shows the end of that log. If the
driver dies, the pipe is closed, and the process ends.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..config.keys import ComputeConfig
from ..config.register import EXECUTORS
from .executor import Executor, PoolSettings, WorkerLost
from .worker import AttackWorker
from .worker_spec import WorkerSpec

_COMMAND = f"from {__name__} import serve; serve()"
_END_SECONDS = 1.0  # a process may take this long to exit after it has closed its pipe
_LAST_WORDS = 2000  # bytes of a lost worker's log in the message about it
_DEVICES = "CUDA_VISIBLE_DEVICES"


@EXECUTORS("local", describes="worker processes on this machine, without Ray", order=1)
class LocalExecutor(Executor):
    """Starts worker processes."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(address)
        self._begun: list[_Process] = []

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """Return as many workers as GPUs or cores have room for, unless their number is configured."""
        n_gpus = len(_gpus())
        each = compute.num_gpus if compute.num_gpus is not None else float(n_gpus > 0)
        room = n_gpus / each if each else len(os.sched_getaffinity(0)) / compute.num_cpus
        return PoolSettings(compute, compute.num_workers or max(1, int(room)), each)

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> "_Process":
        """Start a process; with GPUs, it gets the first share of a GPU that no other process has."""
        self._begun = [process for process in self._begun if not process.ended]
        share = min({*range(len(self._begun) + 1)} - {process.share for process in self._begun})
        gpus = _gpus() if settings.num_gpus else []
        visible = {_DEVICES: gpus[int(share * settings.num_gpus) % len(gpus)]} if gpus else {}
        process = _Process(spec, settings.num_gpus, share, visible)
        self._begun.append(process)
        return process


def _gpus() -> list[str]:
    """Return the names of the GPUs, as they appear in CUDA_VISIBLE_DEVICES."""
    if given := os.environ.get(_DEVICES):
        return given.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


class _Process:
    """A worker in its own process, and the thread of this process that waits for its results."""

    def __init__(self, spec: WorkerSpec, num_gpus: float, share: int, visible: dict[str, str]) -> None:
        self.share, self.ended = share, False
        self._log, self._thread = tempfile.TemporaryFile(), ThreadPoolExecutor(1)  # noqa: SIM115
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                start_new_session=True,  # only the driver receives Ctrl-C; it ends its workers
                env={**os.environ, **visible, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        self._thread.submit(self._send, (spec, num_gpus))

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        return self._thread.submit(self._result, method, arguments)

    def end(self) -> None:
        self.ended = True
        self._process.kill()
        self._process.wait()
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)  # not `send`, whose pickler shares the memory of tensors
        with contextlib.suppress(OSError):  # the process is dead, and the pipe has ended
            self._pipe.send_bytes(content)

    def _close(self) -> None:
        self._pipe.close()
        self._log.close()

    def _result(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return what the method returns in the process, or raise what it raises.

        Raises:
            WorkerLost: if the process ends, or its result cannot be unpickled.
        """
        self._send((method, arguments))
        try:
            value, error, trace = pickle.loads(self._pipe.recv_bytes())
        except Exception:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_SECONDS)
            self._process.kill()
            raise WorkerLost(f"{_ending(self._process.wait())}{self._last_words()}") from None
        if error is not None:
            raise error from RuntimeError(f"in the worker:\n{trace}")
        return value

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LAST_WORDS))
        text = self._log.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""


def _ending(code: int) -> str:
    """Describe how a process ended, as in "exit status 3" or "killed by signal 11 (SIGSEGV)"."""
    if code >= 0:
        return f"exit status {code}"
    known = signal.Signals(-code).name if -code in {*signal.Signals} else "real-time"
    memory = ", possibly by the kernel because memory ran out; try a lower compute.num_workers"
    return f"killed by signal {-code} ({known}){memory if -code == signal.SIGKILL else ''}"


def serve() -> None:
    """Run the calls from the driver, one after the other, until the driver closes the pipe."""
    pipe = Connection(int(sys.argv[1]))
    worker = AttackWorker(*pickle.loads(pipe.recv_bytes()))
    calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.put(pickle.loads(pipe.recv_bytes()))
        os._exit(1)  # the driver is dead or wants this process to end

    threading.Thread(target=read, name="calls", daemon=True).start()
    while True:
        pipe.send_bytes(_pickled_result(worker, *calls.get()))


def _pickled_result(worker: AttackWorker, method: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((getattr(worker, method)(*arguments), None, ""))
    except (Exception, SystemExit) as error:
        trace = traceback.format_exc()
        with contextlib.suppress(Exception):  # some exceptions cannot be pickled or unpickled
            content = pickle.dumps((None, error, trace))
            if isinstance(pickle.loads(content)[1], Exception):  # SystemExit would end the driver's command
                return content
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))

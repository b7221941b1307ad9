"""Connects to a Ray cluster, or starts a private Ray on this machine that ends with the process."""

import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray

from ..config.config_file import shortened
from ..errors import ClusterError

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0  # for a cluster on a busy machine; importing Ray takes several of these seconds
_CONSTANTS = ("ENABLE_RAY_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV")
_STARTS = 3  # tries to start a private Ray, whose own limit of 30 s may be too short on a busy machine
_TOO_SLOW = "timed out during startup"
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER, from linux/prctl.h
_LOOK_SECONDS = 1.0  # between two connections to Ray's head
_OWN_HEAD_SECONDS = 3.0  # a private head that refuses connections for this long has ended
# The head of a cluster may restart. After the full time, Ray aborts the process with its own message.
_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
_HEAD_SECONDS = float(os.environ.get(_RECONNECTS, "60")) - 10
WITHOUT_RAY = "The same command with --local needs no Ray: its workers are processes of this machine"

logger = logging.getLogger(__name__)


def connect(address: str | None) -> "HeadWatch | None":
    """Connect to the cluster at the address; without one (or at "local"), start a private Ray.

    Returns a watch over Ray's head; call its `stop` before disconnecting. A Ray Client has none, because its server
    reports a lost head.

    Raises:
        ClusterError: if no cluster answers at the address, or Ray does not start.
    """
    if not address or address == "local":
        return HeadWatch(None, _start())
    require_answer(address)
    try:
        with _own_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:  # another version of Ray or Python, for example
        raise ClusterError(f"the Ray cluster at {address!r} cannot be used: {error}") from error
    return None if address.startswith("ray://") else HeadWatch(address)


class HeadWatch:
    """Ends this process with a clear message if Ray's head stays unreachable.

    Ray's libraries wait for the head inside calls that no exception reaches, and then abort the process.

    Args:
        address: the address of a cluster; None for a private Ray, whose head is never restarted.
        processes: the processes of the private Ray, which end too.
    """

    def __init__(self, address: str | None, processes: Sequence[psutil.Process] = ()) -> None:
        self._address, self._processes, self._over = address, processes, threading.Event()
        host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
        self._head = host.strip("[]"), int(port)
        threading.Thread(target=self._watch, name="head", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, before the connection is closed."""
        self._over.set()

    def _watch(self) -> None:
        last_seen, warned = time.monotonic(), False
        while not self._over.wait(_LOOK_SECONDS):
            try:
                socket.create_connection(self._head, timeout=_CONNECT_SECONDS).close()
            except OSError as error:
                gone = time.monotonic() - last_seen
                if self._address and not warned and gone > _OWN_HEAD_SECONDS:
                    logger.warning("the head of the Ray cluster at %s does not answer (%s)", self._address, error)
                    warned = True
                if gone >= (_HEAD_SECONDS if self._address else _OWN_HEAD_SECONDS) and not self._over.is_set():
                    self._give_up(gone)
            else:
                last_seen, warned = time.monotonic(), False

    def _give_up(self, gone: float) -> None:
        where = f"cluster at {self._address}" if self._address else "that this command has started"
        logger.error(
            "the head of the Ray %s is gone (no answer for %.0f s). Finished partitions are kept: the same command "
            "resumes%s",
            where, gone, " once the head is back" if self._address else f". {WITHOUT_RAY}",
        )  # fmt: skip
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # shows the cursor, which a progress bar hides
            sys.stderr.flush()
        _kill(self._processes)
        os._exit(1)


def require_answer(address: str) -> None:
    """Raise ClusterError unless a Ray cluster answers at the address.

    `ray.init` would retry for minutes, or never return if another service listens there.
    """
    if address in ("auto", "local"):
        return
    parts = re.fullmatch(r"(ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if not parts or not 0 < int(parts[3]) < 2**16:
        raise ClusterError(
            f"{shortened(address)} is not an address of a Ray cluster; give host:port as `ray start --head` prints it, "
            "ray://host:10001, auto, or local"
        )
    try:
        socket.create_connection((parts[2].strip("[]"), int(parts[3])), timeout=_CONNECT_SECONDS).close()
        if not parts[1]:  # a Ray Client has its own time limit
            _require_status(address)
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error}); start one, or leave the address out"
        ) from error


def _require_status(address: str) -> None:
    """Run `ray status` in a separate process, because Ray's connection ignores time limits and Ctrl-C.

    Raises:
        OSError: if the server is not Ray, or does not answer in time.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"what listens there did not answer as Ray within {_ANSWER_SECONDS:g} s") from error
    if done.returncode:
        raise OSError(shortened((done.stderr or done.stdout).strip().rpartition("\n")[2], 200))


def _start() -> list[psutil.Process]:
    """Start a private Ray and return its processes; repeat a start that was too slow."""
    for left in reversed(range(_STARTS)):
        before = psutil.Process().children()
        try:
            with _killing_leftovers(before), _private_settings(), _own_signal_handlers():
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            return _children_since(before)
        except Exception as error:  # Ray has no exception class for a failed start
            slow = _TOO_SLOW in str(error)
            if slow and left:
                logger.warning("a local Ray did not start in time; trying again. %s", _session_folder())
                continue
            what = f"a local Ray did not start, {_STARTS} times; is the machine busy?" if slow else (
                "a local Ray does not start:"
            )  # fmt: skip
            raise ClusterError(f"{what} {error}\n{_session_folder()}\n{WITHOUT_RAY}") from error
    raise AssertionError("the last try returns or raises")


def _session_folder() -> str:
    """Describe the folder of Ray's session and its free space, because Ray does not report a full disk."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = os.environ.get(name) or "/tmp"
    try:
        free = f"has {shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        free = f"cannot be used ({error.strerror})"
    return f"Its session is kept in {folder}, which {free}; {name} names another place"


def _children_since(before: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process not in before]


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill these processes and their children."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()


@contextmanager
def _killing_leftovers(before: Sequence[psutil.Process]) -> Iterator[None]:
    """If the block fails, kill all children of this process except those in `before`.

    Ray kills a raylet that is too slow, but not the raylet's agents, which would slow down the next try for a minute.
    This process therefore adopts orphans during the block.
    """
    prctl: Any = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
    prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    try:
        yield
    except BaseException:
        while left := _children_since(before):
            _kill(left)
            psutil.wait_procs(left)
        raise
    finally:
        prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)


@contextmanager
def _private_settings() -> Iterator[None]:
    """Start a Ray that listens on loopback only, and whose workers share the driver's environment.

    `ray.init` has no arguments for these settings. It replaces a loopback address by the machine's own and, under `uv
    run`, builds an environment for each worker, unless two private constants are off.
    """
    from ray._private import ray_constants

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token into the home folder
    before = {name: getattr(ray_constants, name) for name in _CONSTANTS if hasattr(ray_constants, name)}
    if len(before) < len(_CONSTANTS):
        logger.warning(
            "Ray %s lacks a setting that this release knows: the private Ray may listen beyond loopback, and under "
            "`uv run` its workers may build separate environments",
            ray.__version__,
        )
    for name in before:
        setattr(ray_constants, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(ray_constants, name, value)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore the caller's signal handlers after Ray's start, which installs a handler for SIGTERM.

    Ray's handler calls `sys.exit(SIGTERM)`; the signal is then raised again for the caller's handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, received = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, False
    try:
        yield
    except SystemExit as error:
        received = error.code == signal.SIGTERM
        if not received:
            raise
    finally:
        for number, handler in before.items():
            if handler is not None:  # it was not set from Python
                signal.signal(number, handler)
        if received:
            signal.raise_signal(signal.SIGTERM)

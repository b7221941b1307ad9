"""Connecting to Ray: the cluster that is named, or a private local one that leaves with the process."""

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
_ANSWER_SECONDS = 60.0  # of a cluster that is there, on a busy machine; importing Ray takes seconds of them
_TRIED_VERSIONS = ("2.60.",)  # of Ray, whose private constants are known
_CONSTANTS = ("ENABLE_RAY_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV")
_STARTS = 3  # of a local Ray, which gives itself 30 s; on a busy machine that may be too short
_TOO_SLOW = "timed out during startup"
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER, from linux/prctl.h
_LOOK_SECONDS = 1.0  # between two looks at whether Ray's head answers
_OWN_HEAD_SECONDS = 3.0  # a head on this machine that refuses connections for so long has ended
_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
# One elsewhere may be started again. Ray waits so long for it, and then aborts the process with words of its own.
_HEAD_SECONDS = float(os.environ.get(_RECONNECTS, "60")) - 10
WITHOUT_RAY = "The same command with --local needs no Ray: its workers are processes of this machine"

logger = logging.getLogger(__name__)


def connect(address: str | None) -> "HeadWatch | None":
    """To the cluster at the address; without one (or at "local"), start a Ray of this process's own.

    Returns the watch over its head, which must be stopped before the connection is given up; None for a Ray client,
    whose server tells.

    Raises:
        ClusterError: where nothing answers at the address, or no Ray starts.
    """
    if address and address != "local":
        require_answer(address)
        _connect(address)
        return None if address.startswith("ray://") else HeadWatch(address)
    return HeadWatch(None, _start())


class HeadWatch:
    """Ends this process with a line of ours where the head of the Ray that it uses is gone for good.

    Ray's own libraries wait for it inside calls that no exception reaches, and then abort the process. What workers
    have written is kept; the processes of a private Ray end with this one.

    Args:
        address: of a cluster; None for a private Ray, whose head nobody starts again.
        processes: of the private Ray, which are ended too.
    """

    def __init__(self, address: str | None, processes: Sequence[psutil.Process] = ()) -> None:
        self._address, self._over = address, threading.Event()
        host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
        self._head = host.strip("[]"), int(port)
        self._patience = _HEAD_SECONDS if address else _OWN_HEAD_SECONDS
        self._processes = processes
        threading.Thread(target=self._watch, name="head", daemon=True).start()

    def stop(self) -> None:
        """Before the connection is given up."""
        self._over.set()

    def _watch(self) -> None:
        answered = time.monotonic()
        told = False
        while not self._over.wait(_LOOK_SECONDS):
            try:
                socket.create_connection(self._head, timeout=_CONNECT_SECONDS).close()
            except OSError as error:
                gone = time.monotonic() - answered
                if not told and self._address and gone > _OWN_HEAD_SECONDS:
                    told = True
                    logger.warning("the head of the Ray cluster at %s does not answer (%s)", self._address, error)
                if gone >= self._patience and not self._over.is_set():
                    self._give_up(gone)
            else:
                answered, told = time.monotonic(), False

    def _give_up(self, gone: float) -> None:
        where = f"cluster at {self._address}" if self._address else "that this command has started"
        logger.error(
            "the head of the Ray %s is gone (no answer for %.0f s). Finished partitions are kept: the same command "
            "resumes%s",
            where, gone, " once the head is back" if self._address else f". {WITHOUT_RAY}",
        )  # fmt: skip
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # the cursor, which a progress bar hides
            sys.stderr.flush()
        _end(self._processes)
        os._exit(1)


def _end(processes: Sequence[psutil.Process]) -> None:
    """These and their children, at once."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def require_answer(address: str) -> None:
    """Ray itself would go on trying a dead address for minutes, and one where something else answers for ever."""
    if address in ("auto", "local"):
        return
    asked = re.fullmatch(r"(ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if not asked or not 0 < int(asked[3]) < 2**16:
        raise ClusterError(
            f"{shortened(address)} is not an address of a Ray cluster; give host:port as `ray start --head` prints it, "
            "ray://host:10001, auto, or local"
        )
    try:
        socket.create_connection((asked[2].strip("[]"), int(asked[3])), timeout=_CONNECT_SECONDS).close()
        if not asked[1]:  # a client's connection has a time limit of its own
            _ask_for_status(address)
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error}); start one, or leave the address out"
        ) from error


def _ask_for_status(address: str) -> None:
    """In a process of its own: inside Ray's connection neither a time limit nor Ctrl-C would be heard.

    Raises:
        OSError: where what listens there is no Ray, or does not answer in time.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"what listens there did not answer as Ray within {_ANSWER_SECONDS:g} s") from error
    if told.returncode:
        raise OSError(shortened(" ".join((told.stderr or told.stdout).split())[-200:], 200))


def _connect(address: str) -> None:
    try:
        with _own_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:  # another version of Ray or Python, for instance
        raise ClusterError(f"the Ray cluster at {address!r} cannot be used: {error}") from error


def _start() -> list[psutil.Process]:
    """The processes that it has started."""
    for left in reversed(range(_STARTS)):
        before = psutil.Process().children()
        try:
            with _ending_what_a_failure_leaves(before), _for_this_process_alone(), _own_signal_handlers():
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray has no class for it
            if _TOO_SLOW not in str(error):
                raise ClusterError(f"a local Ray does not start: {error}\n{_room()}\n{WITHOUT_RAY}") from error
            if not left:
                raise ClusterError(
                    f"a local Ray did not start, {_STARTS} times; is the machine busy? {error}\n{_room()}\n"
                    f"{WITHOUT_RAY}"
                ) from error
            logger.warning("a local Ray did not start in time; trying again. %s", _room())
        else:
            return _children_since(before)
    raise AssertionError("the last try returns or raises")


def _room() -> str:
    """Where Ray keeps its session, and how much that disk can still take; Ray itself does not say that it is full."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = os.environ.get(name) or "/tmp"
    try:
        free = f"has {shutil.disk_usage(folder).free:,} bytes free"
    except OSError as error:
        free = f"cannot be used ({error.strerror})"
    return f"Its session is kept in {folder}, which {free}; {name} names another place"


def _children_since(before: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process not in before]


@contextmanager
def _ending_what_a_failure_leaves(before: Sequence[psutil.Process]) -> Iterator[None]:
    """Where the block fails, no child of this process is left but those `before`.

    Ray's agents are children of its raylet, which Ray ends itself when it was too slow; they would live on for a minute
    and slow down the next try. On Linux they become children of this process while it asks for orphans.
    """
    prctl: Any = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
    prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    try:
        yield
    except BaseException:
        while left := _children_since(before):
            _end(left)
            psutil.wait_procs(left)
        raise
    finally:
        prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)


@contextmanager
def _for_this_process_alone() -> Iterator[None]:
    """A Ray that starts in here listens on loopback only, and its workers share the driver's environment.

    `ray.init` has no arguments for either: it trades a loopback address for the machine's own, and under `uv run` it
    packs the current folder and builds an environment for each worker. What it does is read from two private
    constants. They are set in the versions of Ray in which this was tried; in another one that lacks them Ray starts
    as it likes, and a warning says so.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    from ray._private import ray_constants

    known = ray.__version__.startswith(_TRIED_VERSIONS) and all(hasattr(ray_constants, name) for name in _CONSTANTS)
    if not known:
        logger.warning(
            "Ray %s is not one of the versions that were tried (%s): its local cluster may listen beyond loopback, and "
            "under `uv run` its workers may build separate environments",
            ray.__version__, ", ".join(f"{version}*" for version in _TRIED_VERSIONS),
        )  # fmt: skip
    before = {name: getattr(ray_constants, name) for name in _CONSTANTS} if known else {}
    for name in before:
        setattr(ray_constants, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(ray_constants, name, value)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray's start puts its own handler for SIGTERM in the place of the caller's; in here the caller's comes back.

    Until then Ray's handler answers the signal with `sys.exit(SIGTERM)`; the signal is raised again for the caller's.
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

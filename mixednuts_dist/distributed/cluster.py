"""Connecting to Ray: the cluster that is named, or a private local one that leaves with the process."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ..config_file import shortened
from ..errors import ClusterError

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0  # of a cluster that is there, on a busy machine; importing Ray takes seconds of them
_TRIED_VERSIONS = ("2.60.",)  # of Ray, whose private constants are known
_CONSTANTS = ("ENABLE_RAY_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV")
_STARTS = 3  # of a local Ray, which gives itself 30 s; on a busy machine that may be too short
_TOO_SLOW = "timed out during startup"
WITHOUT_RAY = "The same command with --local needs no Ray: its workers are processes of this machine"

logger = logging.getLogger(__name__)


def connect(address: str | None) -> None:
    """To the cluster at the address; without one (or at "local"), start a Ray of this process's own.

    Raises:
        ClusterError: where nothing answers at the address, or no Ray starts.
    """
    if address and address != "local":
        require_answer(address)
        _connect(address)
    else:
        _start()


def require_answer(address: str) -> None:
    """Ray itself would go on trying a dead address for minutes, and one where something else answers for ever."""
    if address in ("auto", "local"):
        return
    asked = re.fullmatch(r"(ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if not asked or not 0 < int(asked[3]) < 2**16:
        raise ClusterError(
            f"{shortened(address)} is no address of a Ray cluster; give host:port as `ray start --head` prints it, "
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


def _start() -> None:
    for left in reversed(range(_STARTS)):
        try:
            with _for_this_process_alone(), _own_signal_handlers():
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray has no class for it
            if _TOO_SLOW not in str(error):
                raise ClusterError(f"a local Ray does not start: {error}\n{WITHOUT_RAY}") from error
            if not left:
                raise ClusterError(
                    f"a local Ray did not start, {_STARTS} times; is the machine busy? {error}\n{WITHOUT_RAY}"
                ) from error
            logger.warning("a local Ray did not start in time; trying again")
        else:
            return


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
            "under `uv run` its workers may build environments of their own",
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

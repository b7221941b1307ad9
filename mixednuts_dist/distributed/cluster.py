"""Connect to a Ray cluster, or start a private Ray on this machine that ends with the process."""

import importlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import ray

from ..config.config_file import shortened
from ..errors import ClusterError

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0  # for a cluster on a busy machine; importing Ray takes several of these seconds
_STARTS = 3  # tries to start a private Ray, whose own limit of 30 s may be too short on a busy machine
_LOOK_SECONDS = 1.0  # between two connections to Ray's head
_OWN_HEAD_SECONDS = 3.0  # a private head that refuses connections for this long has ended; nothing restarts it
# The head of a cluster may restart, so Ray waits for it, and then aborts the process with a message that does not help.
# `_watch_head` ends the process 10 s earlier with a clear one.
_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
_HEAD_SECONDS = float(os.environ.get(_RECONNECTS, "60")) - 10
WITHOUT_RAY = "The same command with --local needs no Ray: its workers are processes of this machine"

logger = logging.getLogger(__name__)


def connect(address: str) -> threading.Event:
    """Connect to the cluster at the address, or start a private Ray if the address is "local".

    Returns an event, which must be set before disconnecting: until then, this process ends if Ray's head is lost.

    Raises:
        ClusterError: if no cluster answers at the address, or Ray does not start.
    """
    over = threading.Event()
    if address == "local":
        _start()
    else:
        require_answer(address)
        try:
            _init(address=address)
        except (ConnectionError, RuntimeError, ValueError) as error:  # another version of Ray or Python, for example
            raise ClusterError(f"the Ray cluster at {address!r} cannot be used: {error}") from error
        if address.startswith("ray://"):
            return over  # its server reports a lost head
    threading.Thread(target=_watch_head, args=(address, over), name="head", daemon=True).start()
    return over


def _watch_head(address: str, over: threading.Event) -> None:
    """End this process with a clear message if the head of the cluster, or of a private Ray, stays unreachable.

    Ray's libraries wait for the head inside calls that no exception reaches, and then abort the process.
    """
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    is_own, last_seen, warned = address == "local", time.monotonic(), False
    patience = _OWN_HEAD_SECONDS if is_own else _HEAD_SECONDS
    while not over.wait(_LOOK_SECONDS):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            last_seen, warned = time.monotonic(), False
        except OSError as error:
            gone = time.monotonic() - last_seen
            if gone >= patience and not over.is_set():
                break
            if not (is_own or warned):
                logger.warning("the head of the Ray cluster at %s does not answer (%s)", address, error)
            warned = True
    else:
        return
    where, how = f"cluster at {address}", " once the head is back"
    if is_own:
        where, how = "that this command has started", f". {WITHOUT_RAY}"
        _kill(psutil.Process().children())
    kept = "Finished partitions are kept: the same command resumes"
    logger.error("the head of the Ray %s is gone (no answer for %.0f s). %s%s", where, gone, kept, how)
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # shows the cursor, which a progress bar hides
        sys.stderr.flush()
    os._exit(1)


def require_answer(address: str) -> None:
    """Raise ClusterError unless a Ray cluster answers at the address.

    `ray.init` would retry for minutes, or never return if another service listens there.
    """
    if address == "auto":
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
            # A separate process, because Ray's connection ignores time limits and Ctrl-C.
            command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
            if done.returncode:
                raise OSError(shortened((done.stderr or done.stdout).strip().rpartition("\n")[2], 200))
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error if isinstance(error, OSError) else f"nothing answers as Ray within {_ANSWER_SECONDS:g} s"
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({why}); start one, or leave the address out"
        ) from error


def _start() -> None:
    """Start a private Ray. Private constants of Ray change meanwhile, because `ray.init` has no such arguments."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token into the home folder
    constants = vars(importlib.import_module("ray._private.ray_constants"))
    changed = {"ENABLE_RAY_CLUSTER": False, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": False}
    others, before = psutil.Process().children(), {name: constants.get(name) for name in changed}
    # Listen on loopback, which Ray would replace by the machine's own address. Workers share the environment of the
    # driver; under `uv run`, Ray would build one for each.
    constants.update(changed)
    try:
        for left in reversed(range(_STARTS)):
            try:
                return _init(address="local", include_dashboard=False)
            except Exception as error:  # Ray has no exception class for a failed start
                _kill([process for process in psutil.Process().children() if process not in others])
                if not left:
                    raise ClusterError(
                        f"a local Ray does not start: {error}\nIs the machine busy, or the disk of RAY_TMPDIR, TMPDIR "
                        f"or /tmp full? {WITHOUT_RAY}"
                    ) from error
                logger.warning("a local Ray did not start; trying again: %s", error)
    finally:
        constants.update(before)


def _kill(processes: list[psutil.Process]) -> None:
    """Kill these processes and their children, and wait until these processes have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    psutil.wait_procs(processes, timeout=_CONNECT_SECONDS)


def _init(**options: Any) -> None:
    """Call `ray.init`, and restore the caller's signal handlers afterwards.

    Ray installs two handlers for SIGTERM: one prints a stack trace, and one calls `sys.exit(SIGTERM)`. If the signal
    arrives meanwhile, it is raised again for the caller's handler.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    received = False
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    except SystemExit as error:
        received = bool(before) and error.code == signal.SIGTERM
        if not received:
            raise
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)
        if received:
            signal.raise_signal(signal.SIGTERM)

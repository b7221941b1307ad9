"""A real Ray head as `ray start` makes it: loopback, ports and a folder of its own, ended by its process id."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ports import free_ports

BIN = Path(sys.executable).parent
ONE_MACHINE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # the nodes need no copy of our environment: they are in it
    "RAY_USAGE_STATS_ENABLED": "0",
}
_STARTS = 3


@dataclass(frozen=True)
class Head:
    """Where it listens, and the environment that its clients need."""

    address: str
    dashboard: str
    metrics_port: int
    folder: Path
    environment: dict[str, str]

    def command(self, name: str, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """`ray ...` or `mixednuts ...` as a user of this cluster types it."""
        return subprocess.run(
            [str(BIN / name), *arguments],
            env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip


@contextmanager
def local_head(*options: str, autoscaling: dict[str, Any] | None = None) -> Iterator[Head]:
    """The head for the time of the block; its temporary folder is short, since sockets lie in it.

    `autoscaling` is a cluster configuration for Ray's own fake provider, whose nodes are processes on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="rh-", ignore_cleanup_errors=True) as folder:
        for attempt in range(_STARTS):
            head, command = _head(Path(folder) / str(attempt), options, autoscaling)
            process = _started(head, command)
            if process is not None:
                break
        else:
            raise RuntimeError((head.folder / "head.log").read_text())
        try:
            yield head
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _end_what_is_left(head)


def _head(folder: Path, options: Sequence[str], autoscaling: dict[str, Any] | None) -> tuple[Head, list[str]]:
    """One to be, and the command that starts it."""
    folder.mkdir()
    gcs, dashboard, metrics, client, agent = free_ports(5)
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        **ONE_MACHINE,
        "OMP_NUM_THREADS": "1",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}", "--disable-usage-stats", *options,
    ]  # fmt: skip
    if autoscaling is not None:
        environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        provider = {**autoscaling["provider"], "gcs_address": f"127.0.0.1:{gcs}"}
        (folder / "autoscaling.yaml").write_text(yaml.safe_dump({**autoscaling, "provider": provider}))
        command.append(f"--autoscaling-config={folder / 'autoscaling.yaml'}")
    return Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", metrics, folder, environment), command


def _started(head: Head, command: list[str]) -> "subprocess.Popen[bytes] | None":
    """Its process once it is up; None where it gave up, on a busy machine or on a port that was taken meanwhile."""
    log = head.folder / "head.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=head.environment, stdout=file, stderr=file, start_new_session=True)
    while process.poll() is None and "will now block" not in log.read_text():
        time.sleep(0.2)
    if process.poll() is None:
        return process
    _end_what_is_left(head)
    return None


def _end_what_is_left(head: Head) -> None:
    """Its daemons, which a start that failed leaves behind: they all name its folder."""
    for process in psutil.process_iter(["cmdline"]):
        if str(head.folder) in " ".join(process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                process.kill()

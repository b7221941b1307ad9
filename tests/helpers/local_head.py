"""A real Ray head and nodes as `ray start` makes them: on loopback, with separate ports and folder, ended by pid."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from tests.helpers.ports import free_ports

BIN = Path(sys.executable).parent
ONE_MACHINE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # the nodes need no copy of our environment: they are in it
    "RAY_USAGE_STATS_ENABLED": "0",
}
RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
_STARTS = 6  # on a busy machine most fail
_START_SECONDS = 120.0


@dataclass
class Head:
    """A head's addresses, the environment that its clients need, and its processes."""

    address: str
    dashboard: str
    folder: Path
    environment: dict[str, str]
    started_by: list[str]
    process: "subprocess.Popen[bytes] | None" = None  # which watches the daemons of the head
    _begun: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def command(self, name: str, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run `ray ...` or `mixednuts ...` as a user of this cluster types it."""
        return subprocess.run(
            [str(BIN / name), *arguments],
            env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip

    def start(self, *options: str) -> bool:
        """Start the head, also after `kill`; False if it gave up, on a busy machine or a port that is taken."""
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)  # by which Ray takes a node here for the head
        self.process = self._blocking([*self.started_by, *options], self.folder / "head.log")
        return self.process is not None

    def join(self, labels: Mapping[str, str] | None = None, **environment: str) -> psutil.Process:
        """Add a node of one core, and return its raylet."""
        before, script = self.daemons("raylet"), str(Path(__file__).with_name("ray_node.py"))
        log = self.folder / f"node-{len(self._begun)}.log"
        parameters = {
            "labels": dict(labels or {}),
            "dashboard_agent_listen_port": free_ports(1)[0],
            "runtime_env_dir_name": log.stem,  # nodes that share one delete what a job on another node needs
        }
        command = [sys.executable, script, self.address, json.dumps(parameters), str(self.folder)]
        if not any(self._blocking(command, log, environment) for _ in range(_STARTS)):
            raise RuntimeError(log.read_text())
        return next(raylet for raylet in self.daemons("raylet") if raylet not in before)

    def kill(self) -> None:
        """Kill the whole head at once; its nodes remain."""
        assert self.process is not None
        process = psutil.Process(self.process.pid)
        for each in (process, *process.children(recursive=True), *self.daemons("gcs_server")):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    def daemons(self, name: str) -> list[psutil.Process]:
        """Return the processes of that name of all nodes of this cluster."""
        return [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if name in process.info["name"] and str(self.folder) in " ".join(process.info["cmdline"] or ())
        ]

    def begin(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a process that names the folder of the head, so that `end` finds it."""
        merged = {**self.environment, **(environment or {})}
        with log.open("w") as file:
            begun = subprocess.Popen(command, env=merged, stdout=file, stderr=file, start_new_session=True)
        self._begun.append(begun)
        return begun

    def end(self) -> None:
        """Kill all processes of this cluster, including those that a failed start left behind."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        for begun in self._begun:
            begun.wait()

    def _blocking(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes] | None":
        """Start a process that blocks when it is ready; None if it ends, or is killed because it takes too long."""
        process, deadline = self.begin(command, log, environment), time.monotonic() + _START_SECONDS
        while process.poll() is None and "will now block" not in log.read_text():
            time.sleep(0.2)
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process if process.poll() is None else None


@contextmanager
def local_head(
    *options: str, autoscaling: dict[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Head]:
    """Yield a head, which ends with the block; the path of its folder is short, because sockets are in it.

    `autoscaling` is a cluster configuration for Ray's own fake provider, whose nodes are processes on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="rh-", ignore_cleanup_errors=True) as folder:
        for attempt in range(_STARTS):
            head = _head(Path(folder) / str(attempt), options, autoscaling, environment or {})
            if head.start():
                break
            head.end()
        else:
            raise RuntimeError((head.folder / "head.log").read_text())
        try:
            yield head
        finally:
            if head.process is not None:
                head.process.send_signal(signal.SIGTERM)
                head.process.send_signal(signal.SIGCONT)  # a test may have stopped it
                with suppress(subprocess.TimeoutExpired):
                    head.process.wait(timeout=60)
            head.end()


def _head(
    folder: Path, options: Sequence[str], autoscaling: dict[str, Any] | None, environment: Mapping[str, str]
) -> Head:
    """Return a head that has not started."""
    folder.mkdir()
    gcs, dashboard, metrics, client, agent = free_ports(5)
    environment = {
        **os.environ,
        **environment,
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
    return Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", folder, environment, command)


def awaited(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.1)


def job_of(head: Head, job: str, part: str = "") -> dict[str, Any]:
    """Return what the dashboard answers about a job. A command such as `ray job status` takes seconds to start."""
    found: dict[str, Any] = requests.get(f"{head.dashboard}/api/jobs/{job}{part}", timeout=30).json()
    return found


def stop(head: Head, job: str) -> None:
    """Stop a job over HTTP, before its attack can end."""
    assert requests.post(f"{head.dashboard}/api/jobs/{job}/stop", timeout=30).json() == {"stopped": True}

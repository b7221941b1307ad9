"""The private local Ray that a run starts for itself."""

import sys
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import ray

pytestmark = pytest.mark.usefixtures("ray_session")


def test_nobody_outside_this_machine_can_reach_it() -> None:
    """It asks nobody for a token, so it must not be there for anybody else."""
    listening = [
        connection.laddr.ip.removeprefix("::ffff:")
        for process in psutil.Process().children(recursive=True)
        if "ray" in " ".join(process.cmdline())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert [address for address in listening if not ip_address(address).is_loopback] == []


def test_its_workers_share_the_driver_s_environment() -> None:
    """Under `uv run`, too, where Ray by default builds another one for each worker."""

    @ray.remote(num_cpus=0)
    def surroundings() -> tuple[str, Path]:
        return sys.executable, Path.cwd()

    assert ray.get(surroundings.remote()) == (sys.executable, Path.cwd())

"""The private local Ray that a run starts for itself."""

import re
import socket
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.distributed import cluster
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.distributed.ray_executor import RayExecutor, trial_labels
from mixednuts_dist.errors import ClusterError
from tests.helpers.drivers import Driver, stamps
from tests.helpers.runs import tiny_file


@pytest.mark.usefixtures("ray_executor")
def test_nobody_outside_this_machine_can_reach_it() -> None:
    """It requires no token, so it must listen on loopback only."""
    listening = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's helpers come and go
            if "ray" in " ".join(process.cmdline()):
                open_ones = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
                listening += [connection.laddr.ip.removeprefix("::ffff:") for connection in open_ones]
    assert listening
    assert [address for address in listening if not ip_address(address).is_loopback] == []


HEAD_ENDS = """
import socket, time
from types import SimpleNamespace
from mixednuts_dist.distributed import cluster

cluster._LOOK_SECONDS, cluster._OWN_HEAD_SECONDS, cluster._HEAD_SECONDS = 0.8, 0.3, 0.6
head = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{head.getsockname()[1]}"
cluster.ray.get_runtime_context = lambda: SimpleNamespace(gcs_address=address)
cluster.require_answer = cluster.ray.init = lambda *_, **__: None
cluster.connect("head:6379")
time.sleep(2.0)  # it answers
print("the head answers", flush=True)
head.close()
time.sleep(600)  # as in a call of Ray's
"""


def test_a_lost_head_of_a_cluster_ends_the_command() -> None:
    command = [sys.executable, "-c", HEAD_ENDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stdout == "the head answers\n", "a late look does not end the command"
    assert re.search("the head of the Ray cluster at head:6379 is gone .*resumes once the head", done.stderr, re.DOTALL)


def test_failed_ray_start_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list["subprocess.Popen[bytes]"]()

    def init(**_: Any) -> None:
        assert not any(psutil.pid_exists(process.pid) for process in begun)
        begun.append(subprocess.Popen(["sleep", "600"]))
        raise RuntimeError("the current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError, match=r"(?s)a local Ray does not start: .* timed out.*with --local"):
        cluster.connect("local")
    assert [psutil.pid_exists(process.pid) for process in begun] == [False] * 3
    assert all(process.wait() is not None for process in begun)


@pytest.mark.alone
def test_killed_private_head_ends_a_run_in_one_line(tmp_path: Path) -> None:
    """Ray's own end comes after a minute, with a stack; its agents outlive it."""
    config = tiny_file(tmp_path, partition_size=3)
    driver = Driver(config, str(tmp_path / "runs"), tmp_path / "log")
    driver.wait_until(lambda: bool(stamps(str(tmp_path / "runs"), "attack")))
    family = psutil.Process(driver.process.pid).children(recursive=True)
    next(process for process in family if process.name() == "gcs_server").kill()
    assert driver.exit_status() == 1, driver.log()
    assert "Finished partitions are kept: the same command resumes" in " ".join(driver.log().split())
    assert "Traceback" not in driver.log()
    assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.parametrize("address", ["head", ":6379", "head:port", "head:99999", "http://head:8265", "x" * 999])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ClusterError, match="is not an address of a Ray cluster; give host:port") as caught:
        cluster.require_answer(address)
    assert len(str(caught.value)) < 300


def test_require_answer_rejects_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Ray cluster answers at '{address}' .*nothing answers as Ray"):
            cluster.require_answer(address)
    with pytest.raises(ClusterError, match=f"no Ray cluster answers at '{address}'"):
        cluster.require_answer(address)


NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, "Labels": {"zone": "a"}},
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0, "accelerator_type:L4": 1.0}, "Labels": {"zone": "b"}},
    {"Alive": False, "Resources": {"CPU": 64.0}, "Labels": {"zone": "a"}},
]
CORES = [{"Alive": True, "Resources": {"CPU": 4.0}}]


def settings_of(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], address: str, **compute) -> PoolSettings:
    """Return the workers that an executor would have on these nodes."""
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(RayExecutor, "start", lambda _: None)
    return RayExecutor(address).workers(ComputeConfig(**compute))


@pytest.mark.parametrize(
    ("placement", "n_workers"),
    [
        ({}, 6), ({"accelerator_type": "H100"}, 2), ({"label_selector": {"zone": "b"}}, 4),
        ({"label_selector": {"zone": "!b"}}, 2), ({"label_selector": {"zone": "in(a, b)"}}, 6),
        ({"label_selector": {"zone": "!in(b, c)"}, "accelerator_type": None}, 2),
        ({"label_selector": {"zone": "c"}, "fallback_strategy": [{"label_selector": {"zone": "b"}}]}, 4),
        ({"label_selector": {"zone": "a"}, "fallback_strategy": [{"label_selector": {"zone": "b"}}]}, 6),
    ],
)  # fmt: skip
def test_only_the_nodes_that_the_placement_allows_count(
    monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any], n_workers: int
) -> None:
    settings = settings_of(monkeypatch, NODES, "local", **placement)
    assert (settings.n_workers, settings.num_gpus) == (n_workers, 1.0)
    assert dict(settings.placement) == {name: value for name, value in placement.items() if value}


@pytest.mark.parametrize(("wanted", "selector"), [("b", {"zone": "b"}), ("c", {"zone": "!b"}), ("a", {"zone": "a"})])
def test_trials_run_where_a_node_is(monkeypatch: pytest.MonkeyPatch, wanted: str, selector: dict[str, str]) -> None:
    """Placement groups accept no fallback, so a trial has the one selector that a node satisfies."""
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    fallback = [{"label_selector": {"zone": zone}} for zone in ("d", "!b")]
    compute = ComputeConfig(label_selector={"zone": wanted}, fallback_strategy=fallback)
    assert trial_labels(compute) == selector


def test_cluster_without_room_asks_for_its_final_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"0 cores and 0 GPUs on nodes with compute\.accelerator_type=A100, and"):
        settings_of(monkeypatch, NODES, "local", accelerator_type="A100")
    with pytest.raises(ClusterError, match=r"0 GPUs, and a worker needs 1 and 1. .*set compute\.num_workers"):
        settings_of(monkeypatch, CORES, "local", num_gpus=1)
    assert settings_of(monkeypatch, CORES, "local", num_workers=8, num_gpus=1).n_workers == 8
    assert settings_of(monkeypatch, CORES, "local").n_workers == 4


def test_growing_cluster_warns_of_workers_without_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert settings_of(monkeypatch, CORES, "head:6379", num_workers=8).num_gpus == 0
    assert "set compute.num_gpus=1" in caplog.text
    caplog.clear()
    for chosen in ({"num_workers": 8, "num_gpus": 0}, {"num_workers": 8, "num_gpus": 1}, {}):
        settings_of(monkeypatch, CORES, "head:6379", **chosen)
    settings_of(monkeypatch, CORES, "local", num_workers=8)
    assert not caplog.text

"""cluster.yaml's node types under Ray's autoscaler, on its fake provider: up for waiting workers, down when idle."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from tests.helpers.local_head import Head, awaited, local_head
from tests.helpers.runs import tiny_file

HEAD_TYPE = "ray.head.default"  # as the fake provider calls whatever node it runs on
HEAD_ID = "f" * 51 + "00000"
CLUSTER = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text())


def on_the_fake_provider() -> dict[str, Any]:
    """cluster.yaml without the cloud: its types, bounds and head, machines that are processes, and less patience."""
    types = {
        HEAD_TYPE if name == CLUSTER["head_node_type"] else name: {
            **kind,
            "node_config": {},
            "resources": {**kind["resources"], "CPU": min(1, kind["resources"]["CPU"])},
        }
        for name, kind in CLUSTER["available_node_types"].items()
    }
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    unused = (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    return {
        **{key: CLUSTER[key] for key in ("cluster_name", "max_workers")},
        "head_node_type": HEAD_TYPE,
        **{key: [] for key in unused},
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "available_node_types": types,
        "provider": provider,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "file_mounts_sync_continuously": False,
    }


def gpu_nodes(head: Head) -> int:
    nodes = requests.get(f"{head.dashboard}/nodes?view=summary", timeout=30).json()["data"]["summary"]
    alive = [node["raylet"] for node in nodes if node["raylet"]["state"] == "ALIVE"]
    return sum(bool(raylet["resourcesTotal"].get("GPU")) for raylet in alive)


def kill_a_machine(head: Head) -> None:
    """SIGKILL the raylet of one GPU node and its worker, as a preempted spot machine."""
    for process in psutil.process_iter(["name", "cmdline"]):
        ours = process.info["name"] == "raylet" and str(head.folder) in " ".join(process.info["cmdline"])
        if ours and process.environ()["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] != HEAD_ID:
            process.kill()
            return
    raise AssertionError("the fake provider has no machine")


@pytest.mark.alone
@pytest.mark.timeout(420)
def test_autoscaler_adds_replaces_and_removes_nodes(tmp_path: Path) -> None:
    """A single try a partition is allowed: a lost machine must not use it up."""
    long_enough = {"partition_size": 2, "attack": {"n_iter": 60, "n_target_classes": 9}}
    config = tiny_file(tmp_path, **long_enough)
    with local_head("--num-cpus=0", "--num-gpus=0", autoscaling=on_the_fake_provider()) as head:
        assert gpu_nodes(head) == 0
        # By cores, which the head has none of: a worker that is given one of the fake GPUs would refuse to start.
        sizes = ["compute.num_gpus=0", "compute.num_workers=2", "compute.max_tries=1"]
        arguments = ["attack", str(config), "--address", head.address, *(f"--set={size}" for size in sizes)]
        with ThreadPoolExecutor() as threads:
            attack = threads.submit(head.command, "mixednuts", *arguments)
            awaited(lambda: gpu_nodes(head) == 2 or attack.done(), "two machines for two waiting workers")
            assert gpu_nodes(head) == 2
            awaited(lambda: bool(list(tmp_path.glob("runs/*/attack/*/part-*"))), "the first partition")
            kill_a_machine(head)
            shown = attack.result()
        assert shown.returncode == 0, shown.stderr
        assert "24/24 images" in shown.stderr
        awaited(lambda: gpu_nodes(head) == 0, "the idle machines to go")

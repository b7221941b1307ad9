"""Our pool and Ray Data's `map_batches` over actors, on the same attack. Run: `mixednuts benchmark ray_data`; minutes.

Both have two workers of a core each, the same partitions of digits and the same worker class, which writes the same
files. Four times: undisturbed; with an image at which the classifier raises; with one worker process killed once the
first file is there; and on four simulated nodes, one of which is killed then. Ray Data is asked as it is by default,
and for the poison image also with `max_errored_blocks`, which lets the others finish.
"""

import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray.data
from ray.cluster_utils import Cluster
from ray.data import ActorPoolStrategy, DataContext

from ..config import RunConfig, parse_config
from ..distributed.cluster import RaySession
from ..distributed.tasks import Task, WorkerSpec
from ..distributed.worker import AttackWorker
from ..stages import attack
from ..stages.attack import attack_task
from ..stages.partitioned import worker_spec
from ..stages.runs import Run, finished_partitions, open_run
from ..storage.partitions import split_images
from ..storage.records import Receipt

_SIZE = 8  # images a partition
_POISON = """
import torch
from mixednuts_dist.classifiers.factories import demo_rob
from mixednuts_dist.images.arrays import load_digits_split

class Touchy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.bad = demo_rob(), load_digits_split("test")[0][{image}]

    def forward(self, x):
        if bool((x == self.bad).flatten(1).all(dim=1).any()):
            raise ValueError("image {image} is poison")
        return self.net(x)
"""


@dataclass(frozen=True)
class _Case:
    poison: bool = False
    kill: str = ""  # "worker" or "node"
    skip_errors: bool = False  # Ray Data's max_errored_blocks


def run(n_images: int = 256) -> dict[str, Any]:
    """Prints a line a case and contestant, and returns their numbers."""
    cases = {"undisturbed": _Case(), "poison image": _Case(poison=True), "worker killed": _Case(kill="worker")}
    results: dict[str, Any] = {}
    with RaySession("local") as session:
        session.ensure()
        attack.run(_configuration(Path(tempfile.mkdtemp()), 16, _Case()), session=session)  # imports, once
        for name, case in cases.items():
            results[f"{name}: ours"] = _measured(n_images, case, functools.partial(attack.run, session=session))
            results[f"{name}: Ray Data"] = _measured(n_images, case, functools.partial(_by_ray_data, case=case))
        case = _Case(poison=True, skip_errors=True)
        results["poison image: Ray Data, max_errored_blocks"] = _measured(
            n_images, case, functools.partial(_by_ray_data, case=case)
        )
    case = _Case(kill="node")
    results["node killed: ours"] = _on_nodes(n_images, case, attack.run)
    results["node killed: Ray Data"] = _on_nodes(n_images, case, functools.partial(_by_ray_data, case=case))
    return results


def _on_nodes(n_images: int, case: _Case, contestant: Callable[..., Any]) -> dict[str, Any]:
    """Four nodes of a core each, two of which have a worker; whoever works then is connected to them."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(4):
            cluster.add_node(num_cpus=1)
        cluster.connect()  # type: ignore[no-untyped-call]
        return _measured(n_images, case, contestant, cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


class _Mapper:
    """The worker as Ray Data wants it: a callable on batches, here of one partition's number."""

    def __init__(self, spec: WorkerSpec, task: Task, n_images: int) -> None:
        self.worker, self.task, self.partitions = AttackWorker(spec), task, split_images(n_images, _SIZE)
        self.worker.ready()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for i in batch["item"]:
            self.worker.process(self.partitions[int(i)], self.task)
            self.worker.flush()
        return batch


def _by_ray_data(config: RunConfig, case: _Case) -> None:
    opened = open_run(config)
    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = len(opened.partitions) if case.skip_errors else 0
    numbers = ray.data.from_items(list(range(len(opened.partitions))), override_num_blocks=len(opened.partitions))
    given = worker_spec(opened), attack_task(opened), opened.inputs.n_images
    mapped = numbers.map_batches(
        _Mapper, fn_constructor_args=given, batch_size=1, num_cpus=1, compute=ActorPoolStrategy(size=2)
    )
    for _ in mapped.iter_rows():
        pass


def _configuration(folder: Path, n_images: int, case: _Case) -> RunConfig:
    (folder / "poison.py").write_text(_POISON.format(image=n_images // 2), encoding="utf-8")
    return parse_config({
        "name": "ray-data", "data": {"uri": "digits", "n": n_images}, "std": "demo:std", "threat": {"eps": 0.15},
        "rob": f"py:{folder / 'poison.py'}:Touchy" if case.poison else "demo:rob", "partition_size": _SIZE,
        "precision": "fp32", "attack": {"n_iter": 30}, "storage": str(folder / "runs"),
        "compute": {"num_workers": 2, "batch_size": 16},
    })  # fmt: skip


def _measured(
    n_images: int, case: _Case, contestant: Callable[..., Any], cluster: Cluster | None = None
) -> dict[str, Any]:
    """Wall time from the call to its end, and what is there then."""
    with tempfile.TemporaryDirectory() as folder:
        config, told = _configuration(Path(folder), n_images, case), ""
        opened = open_run(config)
        killer = threading.Thread(target=_kill_one, args=(opened, cluster), daemon=True)
        if case.kill:
            killer.start()
        started = time.perf_counter()
        try:
            contestant(config)
        except Exception as error:  # what it raises is what is measured
            told = " ".join(str(error).split())[:160]
        wall = time.perf_counter() - started
        receipts = list(finished_partitions(opened, "attack", opened.attack_fingerprint).values())
    found = {"seconds": wall, **_shares(receipts, n_images), "error": told}
    sys.stderr.write(f"{case}: {found}\n")
    return found


def _shares(receipts: list[Receipt], n_images: int) -> dict[str, Any]:
    """Images that are there, their pace from the first piece's start on, and the two workers' time not at work."""
    n_done = sum(receipt.n_images for receipt in receipts)
    begun = min((receipt.finished - receipt.seconds for receipt in receipts), default=0.0)
    wall = max((receipt.finished for receipt in receipts), default=0.0) - begun
    busy = sum(receipt.seconds for receipt in receipts)
    return {
        "images": f"{n_done} of {n_images}",
        "images_a_second": n_done / wall if wall else 0.0,
        "share_not_worked": 1 - busy / (2 * wall) if wall else 0.0,
    }


def _kill_one(opened: Run, cluster: Cluster | None) -> None:
    """A worker, or its whole node where there is a cluster of them, once the first file is there."""
    while not any(name.endswith(".parquet") for name in opened.store.names("attack")):
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        if command.startswith("ray::") and ("AttackWorker" in command or "MapWorker" in command):
            if cluster is None:
                process.kill()
                return
            above = {parent.pid for parent in process.parents()}
            raylets = {node: {one.process.pid for one in node.all_processes["raylet"]} for node in cluster.worker_nodes}
            cluster.remove_node(next(node for node, pids in raylets.items() if pids & above), False)
            return
    sys.stderr.write("no worker was found to kill\n")

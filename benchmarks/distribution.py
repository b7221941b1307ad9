"""Measure the costs and gains of distribution.

Run `python -m benchmarks.distribution` on a quiet machine. It takes minutes and measures:

- orchestration: the share of the wall time in which two workers do not work, with partitions that take 10 s. The
  workers sleep for that time.
- scaling: the speedup of a real attack by two workers over the same attack by one worker.
- driver: the partitions per second of the driver with 100,000 partitions, 1,000 workers and real Ray tasks. The workers
  are sleeping coroutines in four processes, because a machine cannot hold 1,000 processes.
- occupancy: the share of the rows of AutoAttack's passes, verifications included, that hold an image and count, with
  each partition alone and with later partitions prefetched.
- tail: the idle time at the end of a stage on 64 simulated GPUs with the pool's own queue. The costs of the images are
  drawn from passes counted here.
"""

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import psutil
from torch import Tensor

from benchmarks.simulation import simulate, sleep_through
from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.adaptive import minimum_margin_attack
from mixednuts_dist.attacks.budget import STANDARD_ATTACKS, AttackBudget
from mixednuts_dist.attacks.scheduler import Group, Scheduler
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.distributed.executor import Executor
from mixednuts_dist.distributed.ray_executor import RayExecutor
from mixednuts_dist.distributed.schedule import PREFETCHED
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.transforms import layer_norm_logits
from mixednuts_dist.stages import attack
from mixednuts_dist.stages.progress import RunProgress
from mixednuts_dist.storage.partitions import Partition, partition_size_of, split_images
from mixednuts_dist.storage.records import PartitionSummary

_THREAT = ThreatModel("Linf", 0.15)  # for the packaged pair on the digits
_PASSES_A_SECOND = 300.0  # for the simulated GPU: a large network on large images
_GPUS = 64
_BUDGET = AttackBudget(n_iter=20, n_target_classes=3, n_queries=500)


def run() -> dict[str, Any]:
    """Run all measurements, print one line per measurement, and return the numbers."""
    with RayExecutor("local") as executor:
        executor.start()
        results = {
            "orchestration": _told(orchestration()),
            "scaling": _told(scaling(executor)),
            "driver": _told(driver()),
        }
    return {**results, "occupancy": _told(occupancy()), "tail": _told(tail(count_passes()))}


def orchestration(n_partitions: int = 6, seconds: float = 10.0) -> dict[str, Any]:
    """Measure the share of time in which two sleeping workers do not work, from the first start to the last end."""
    summaries: list[PartitionSummary] = []
    sleep_through(2, split_images(n_partitions, 1), seconds, summaries.append)
    wall = _wall(summaries)
    busy = sum(summary.seconds for summary in summaries)
    return {"partition_seconds": seconds, "wall_seconds": wall, "share_not_worked": 1 - busy / (2 * wall)}


def scaling(executor: Executor, n_images: int = 384) -> dict[str, Any]:
    """Time the attack stage on digits with one and with two workers of one core each, without their start."""
    wall = {n_workers: _attack_seconds(executor, n_workers, n_images) for n_workers in (1, 2)}
    return {"cores": psutil.cpu_count(), "one_s": wall[1], "two_s": wall[2], "speedup": wall[1] / wall[2]}


def driver(n_partitions: int = 100_000, n_workers: int = 1000, seconds: float = 1.0) -> dict[str, Any]:
    """Measure the driver's partitions per second, and its memory after a tenth of them and at the end."""
    process, memory, n_done = psutil.Process(), [], 0

    def count(_: PartitionSummary) -> None:
        nonlocal n_done
        n_done += 1
        if n_done in (n_partitions // 10, n_partitions):
            memory.append(process.memory_info().rss / 2**20)

    started, cpu = time.perf_counter(), _cpu_seconds()
    sleep_through(n_workers, split_images(n_partitions, 1), seconds, count)
    wall = time.perf_counter() - started
    return {
        "partitions": n_done,
        "workers": n_workers,
        "wall_seconds": wall,
        "partitions_per_second": n_done / wall,
        "driver_cpu_ms_per_partition": 1000 * (_cpu_seconds() - cpu) / n_done,
        "memory_mib_at_a_tenth": memory[0],
        "memory_mib_at_the_end": memory[-1],
    }


def count_passes(n_images: int = 40, n_iter: int = 100) -> list[int]:
    """Return the number of forward passes that MMAA needs per image on the demo classifier, one image at a time."""
    rob = load_classifier("demo:rob", "rob")
    x, y = open_dataset("digits").read(0, n_images)

    def count(i: int) -> int:
        found = minimum_margin_attack(
            lambda images: layer_norm_logits(rob(images)), x[i : i + 1], y[i : i + 1],
            threat=_THREAT, n_iter=n_iter, border_restarts=0, sample_ids=[i], batch_size=1,
        )  # fmt: skip
        return found.n_forward

    return [count(i) for i in range(n_images)]


def occupancy(
    n_images: int = 899, partition_size: int = 64, rows: int = 64, budget: AttackBudget = _BUDGET
) -> dict[str, float]:
    """Return the share of useful rows when AutoAttack attacks the demo classifier in batches of one fixed size.

    Useful rows are counted by `n_forward`, which includes clean images and verifications. All other rows are idle.
    """
    dataset, rob = open_dataset("digits"), load_classifier("demo:rob", "rob")
    partitions = split_images(n_images, partition_size)
    like, _ = dataset.read(0, rows)

    def group(partition: Partition) -> Group:
        x, y = dataset.read(partition.start, partition.stop)
        return Group(x, y, range(partition.start, partition.stop))

    def share(n_prefetched: int) -> float:
        n_passed = 0

        def counted(images: Tensor) -> Tensor:
            nonlocal n_passed
            n_passed += len(images)
            logits: Tensor = rob(images)
            return logits

        engine = Scheduler(
            counted, like, threat=_THREAT, attacks=STANDARD_ATTACKS, budget=budget, shape=BatchShape(rows, fixed=True)
        )
        ended = (
            engine.finish(partition, group, partitions[i + 1 : i + 1 + n_prefetched])
            for i, partition in enumerate(partitions)
        )
        n_forward = sum(finished.n_forward for finished in ended)
        return n_forward / n_passed

    return {"alone": share(0), f"{PREFETCHED} prefetched": share(PREFETCHED)}


def tail(passes: Sequence[int], sizes: Sequence[int] = (5_000, 10_000, 50_000)) -> dict[str, Any]:
    """Simulate 64 GPUs on images with passes drawn from `passes`, and return the excess over the ideal makespan."""
    shown: dict[str, Any] = {"gpus": _GPUS, "passes": sorted(passes)}
    for n_images in sizes:
        draw = random.Random(0)
        seconds = [draw.choice(passes) / _PASSES_A_SECOND for _ in range(n_images)]
        for size in (partition_size_of(n_images, None), 16):
            weights = {part: sum(seconds[part.start : part.stop]) for part in split_images(n_images, size)}
            excess = {
                "costs_unknown": simulate(seconds, [1.0] * _GPUS, partition_size=size),
                "costs_known": simulate(seconds, [1.0] * _GPUS, partition_size=size, weights=weights),
                "half_of_them_twice_as_fast": simulate(seconds, [1.0, 2.0] * (_GPUS // 2), partition_size=size),
            }
            shown[f"{n_images} images, partitions of {size}"] = {case: each.excess for case, each in excess.items()}
    return shown


class _Collector(RunProgress):
    def __init__(self) -> None:
        self.summaries: list[PartitionSummary] = []

    def partition_done(self, summary: PartitionSummary) -> None:
        self.summaries.append(summary)


def _attack_seconds(executor: Executor, n_workers: int, n_images: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config({
            "name": "scaling", "data": {"uri": "digits", "n": n_images}, "std": "demo:std", "rob": "demo:rob",
            "threat": {"eps": _THREAT.eps}, "partition_size": 16, "storage": folder,
            "compute": {"num_workers": n_workers, "batch_size": 16},
        })  # fmt: skip
        collector = _Collector()
        attack.run(config, executor=executor, progress=collector)
    return _wall(collector.summaries)


def _wall(summaries: Sequence[PartitionSummary]) -> float:
    begun = min(summary.finished - summary.seconds for summary in summaries)
    return max(summary.finished for summary in summaries) - begun


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _told(result: dict[str, Any]) -> dict[str, Any]:
    sys.stderr.write(f"{result}\n")
    return result


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))

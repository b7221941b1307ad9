"""Computed partitions that wait for the storage count once they are stored, and run again if their worker dies."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.distributed.pool import Pool
from mixednuts_dist.distributed.ray_executor import ActorWorker, RayExecutor
from mixednuts_dist.distributed.schedule import WorkQueue
from mixednuts_dist.distributed.worker_spec import Place
from mixednuts_dist.errors import PartitionFailed
from mixednuts_dist.stages.attack import AttackTask
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import Receipt
from tests.helpers.worker_specs import unchecked_spec

TASK = AttackTask(stage="attack", fingerprint="", budget=AttackBudget(n_iter=1, n_target_classes=1))


class Hoarder:
    """A worker whose storage answers at the very end; the first one dies with all that it has computed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, dict[Partition, Receipt]()

    def locate(self) -> Place:
        return Place(platform.node())

    def ready(self) -> str:
        return "cpu"

    def process(self, piece: Partition, task: AttackTask, *_ahead: Any) -> dict[Partition, Receipt]:
        (self.folder / f"{piece.index}-{time.monotonic_ns()}").touch()
        self.kept[piece] = Receipt(
            stage=task.stage, partition=piece.index, start=piece.start, stop=piece.stop, clean_correct=0, robust=0,
            seconds=0.1, n_forward=1, n_backward=1, node="",
        )  # fmt: skip
        return {}

    def flush(self) -> dict[Partition, Receipt]:
        try:
            (self.folder / "dead").touch(exist_ok=False)
        except FileExistsError:
            return self.kept
        os._exit(1)


class OneComputed(Hoarder):
    """It fails at all partitions but the first, which it keeps until `flush`."""

    def process(self, piece: Partition, task: AttackTask, *_ahead: Any) -> dict[Partition, Receipt]:
        if piece.index:
            raise ValueError("this partition fails")
        return super().process(piece, task)

    def flush(self) -> dict[Partition, Receipt]:
        return self.kept


class HoardingExecutor(RayExecutor):
    def __init__(self, kind: type[Hoarder], folder: Path) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder

    def begin(self, *_: object) -> ActorWorker:
        return ActorWorker(ray.remote(self.kind).options(num_cpus=0).remote(self.folder))


def pool_of(tmp_path: Path, n_workers: int, receipts: list[Receipt], kind: type[Hoarder] = Hoarder) -> Pool:
    spec = unchecked_spec(tmp_path)
    settings = PoolSettings(n_workers, 0, 0, max_tries=1)
    return Pool(spec, TASK, settings, HoardingExecutor(kind, tmp_path), receipts.append)


@pytest.mark.alone
@pytest.mark.usefixtures("ray_executor")
@pytest.mark.parametrize("n_workers", [1, 2])
def test_unwritten_partitions_count_once_stored(tmp_path: Path, n_workers: int) -> None:
    partitions, receipts = [Partition(i, i, i + 1) for i in range(6)], list[Receipt]()
    pool_of(tmp_path, n_workers, receipts).run(WorkQueue(partitions))
    assert sorted(receipt.start for receipt in receipts) == list(range(6))
    computed = [int(path.name.partition("-")[0]) for path in tmp_path.glob("*-*")]
    assert set(computed) == set(range(6))
    assert 6 < len(computed) <= 12  # the dead worker's partitions run twice and keep their single try


@pytest.mark.slow
@pytest.mark.usefixtures("ray_executor")
def test_unwritten_partition_is_kept_if_all_others_fail(tmp_path: Path) -> None:
    partitions, receipts = [Partition(i, i, i + 1) for i in range(3)], list[Receipt]()
    pool = pool_of(tmp_path, 1, receipts, OneComputed)
    with pytest.raises(PartitionFailed) as failed:
        pool.run(WorkQueue(partitions))
    assert str(failed.value).count("this partition fails") == 2, "something works, so each of the others has its try"
    assert [receipt.start for receipt in receipts] == [0]


class Doomed(Hoarder):
    """Its storage never answers: each one dies while it only waits."""

    def flush(self) -> dict[Partition, Receipt]:
        os._exit(1)


@pytest.mark.alone
@pytest.mark.usefixtures("ray_executor")
def test_partition_whose_workers_die_waiting_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixednuts_dist.distributed.schedule.MAX_LOST_MACHINES", 3)
    pool = pool_of(tmp_path, 1, [], Doomed)
    with pytest.raises(PartitionFailed, match=r"partition 0 .*lost 3 "):
        pool.run(WorkQueue([Partition(0, 0, 4)]))
    assert len(list(tmp_path.glob("0-*"))) == 3

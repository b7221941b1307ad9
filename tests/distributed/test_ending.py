"""How a stage ends: every worker is released, whatever ended it."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from mixednuts_dist.distributed import metrics
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.distributed.pool import Pool
from mixednuts_dist.distributed.ray_executor import ActorWorker, RayExecutor
from mixednuts_dist.distributed.schedule import WorkQueue
from mixednuts_dist.distributed.tasks import Task
from mixednuts_dist.distributed.worker_spec import Place
from mixednuts_dist.errors import ClusterError, StoreError
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import Receipt
from tests.helpers.worker_specs import unchecked_spec


class Failing:
    """Its storage fails at every partition, which ends the stage."""

    def locate(self) -> Place:
        return Place("node")

    def ready(self) -> str:
        return "cpu"

    def process(self, piece: Partition, task: Task, *_: object) -> dict[Partition, Receipt]:  # noqa: ARG002
        raise StoreError("no answer")


class FailingExecutor(RayExecutor):
    def begin(self, *_: object) -> ActorWorker:
        self.actor = ray.remote(Failing).options(num_cpus=0).remote()
        return ActorWorker(self.actor)


@pytest.mark.usefixtures("ray_executor")
def test_the_worker_whose_error_ends_the_stage_is_ended_at_once(tmp_path: Path) -> None:
    spec = unchecked_spec(tmp_path)
    executor = FailingExecutor()
    with pytest.raises(StoreError):
        Pool(spec, Task(stage="attack", fingerprint=""), PoolSettings(1, 0, 0), executor).run(
            WorkQueue([Partition(0, 0, 4)])
        )
    deadline = time.monotonic() + 60
    with pytest.raises(RayActorError):  # Ray ends it without waiting for its end
        while time.monotonic() < deadline:
            ray.get(executor.actor.ready.remote())


@pytest.mark.usefixtures("ray_executor")
def test_pool_names_requested_and_present_resources(tmp_path: Path) -> None:
    spec = unchecked_spec(tmp_path)
    settings = PoolSettings(1, 10_000, 0, start_seconds=0.5)
    pool = Pool(spec, Task(stage="attack", fingerprint=""), settings, RayExecutor())
    with pytest.raises(ClusterError, match=r"1 were requested, each with 10000 CPUs.*the cluster has \d+ CPUs"):
        pool.run(WorkQueue([Partition(0, 0, 4)]))


def test_the_variants_of_studies_and_the_rounds_share_one_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    gauge = SimpleNamespace(set=lambda _value, tags: seen.append(tags))
    monkeypatch.setattr(metrics, "_gauge", lambda _name: gauge)
    monkeypatch.setattr(metrics, "DESCRIPTIONS", ["images"])
    for stage in ("studies/rows/1a2b3c4d", "studies/rows/5e6f7a8b", "search/round-1", "attack"):
        metrics.export("run", stage, {})
    assert [tags["stage"] for tags in seen] == ["studies", "studies", "search", "attack"]

"""Whose fault it was: tries are counted, machines that are taken away are not, and both end."""

import re
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from mixednuts_dist.distributed.executor import WorkerLost
from mixednuts_dist.distributed.ray_executor import RayExecutor, _plain
from mixednuts_dist.distributed.schedule import MAX_LOST_MACHINES, Failures
from mixednuts_dist.errors import PartitionFailed
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.store import Store

PART = Partition(4, 40, 60)


@pytest.fixture
def failures(tmp_path: Path) -> Failures:
    return Failures(Store(str(tmp_path)), "attack", max_tries=2)


CUDA = RuntimeError("CUDA error")


def test_lost_machines_use_up_no_try_but_have_a_bound(failures: Failures, tmp_path: Path) -> None:
    gone = WorkerLost("gone again\nthe log")
    assert [failures.failed(PART, gone, None, 1) for _ in range(MAX_LOST_MACHINES - 1)] == [True] * 9
    assert failures.failed(PART, CUDA, "a", 1)
    failures.raise_if_quarantined()
    assert not failures.failed(PART, gone, None, 1)
    with pytest.raises(
        PartitionFailed, match=r"partition 4 \(images 40-59\) lost 10 machines.*gone again.*ack-00004\.txt"
    ):
        failures.raise_if_quarantined()
    assert "the log" in (tmp_path / "errors" / "attack-00004.txt").read_text()


def test_one_of_several_nodes_does_not_condemn_a_partition(failures: Failures) -> None:
    assert all(failures.failed(PART, CUDA, "bad", 2) for _ in range(5))
    assert not failures.failed(PART, CUDA, "good", 2)
    other = Partition(0, 0, 20)
    tries = [failures.failed(other, CUDA, "bad", 2) for _ in range(6)]
    assert tries == [True] * 5 + [False], "the tries of a partition that no other node gets are bounded, too"


@pytest.mark.usefixtures("ray_executor")
def test_dead_process_differs_from_a_lost_machine() -> None:
    assert not RayExecutor().is_gone(ray.get_runtime_context().get_node_id())
    assert RayExecutor().is_gone("0" * 56)
    died, unreachable = ActorDiedError(), ActorUnavailableError("Socket closed", None)
    assert not _plain(died).machine
    assert _plain(unreachable).machine
    died._preempted = True  # as Ray marks the actors of a drained spot machine
    assert _plain(died).machine
    assert re.match(r"the cluster has \d+ CPUs \(\d+ free\), 0 GPUs", RayExecutor().room())

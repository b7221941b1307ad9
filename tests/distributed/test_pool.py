"""The pool on Ray: killed processes, images that crash a worker, and workers that cannot start."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.errors import BaseClassifierError
from mixednuts_dist.stages import attack
from mixednuts_dist.stages.progress import RunProgress
from mixednuts_dist.storage.records import PartitionSummary
from tests.helpers.touchy_classifiers import FACTORY, table


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "touchy.py"
    path.write_text(FACTORY)
    return path


class KillOnFirstPartitionSummary(RunProgress):
    """SIGKILLs every worker process once, when the first partition has come back."""

    def __init__(self) -> None:
        self.killed = 0

    def partition_done(self, summary: PartitionSummary) -> None:
        if self.killed or not summary.n_images:
            return
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # Ray's helpers come and go
                if "ray::RayWorker" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)
                    self.killed += 1


@pytest.mark.alone
def test_killed_workers_cost_nothing_but_time(
    tiny: Callable[..., RunConfig], tmp_path: Path, ray_executor: Any
) -> None:
    config = tiny(partition_size=2)  # enough partitions to prefetch
    killer = KillOnFirstPartitionSummary()
    attack.run(config, executor=ray_executor, progress=killer)
    assert killer.killed >= 1
    undisturbed = config.with_changes(storage=str(tmp_path / "undisturbed"))
    attack.run(undisturbed, executor=ray_executor)
    assert table(config) == table(undisturbed)
    assert sorted(table(config)["sample_id"]) == list(range(24))


@pytest.mark.alone
def test_hanging_worker_is_replaced(
    tiny: Callable[..., RunConfig], factory: Path, ray_executor: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("mixednuts_dist.distributed.schedule.LEAST_OVERDUE", 2.0)
    monkeypatch.setattr("mixednuts_dist.distributed.pool._LOOK_SECONDS", 0.2)
    config = tiny(rob=f"py:{factory}:hanging_once", compute={"num_workers": 2, "num_cpus": 1, "watchdog": 1})
    attack.run(config, executor=ray_executor)
    assert (factory.parent / "mark").exists()
    assert "TimeoutError: not finished after" in caplog.text
    assert sorted(table(config)["sample_id"]) == list(range(24))


def test_a_worker_with_other_weights_than_the_driver_is_refused(
    tiny: Callable[..., RunConfig], tmp_path: Path, ray_executor: Any
) -> None:
    path = tmp_path / "unsteady.py"
    path.write_text(
        "import os\nfrom mixednuts_dist.classifiers.factories import demo_rob\n"
        "def rob():\n    net = demo_rob()\n    next(net.parameters()).data += float(os.getpid())\n    return net\n"
    )
    with pytest.raises(BaseClassifierError, match="this machine holds other weights"):
        attack.run(tiny(rob=f"py:{path}:rob"), executor=ray_executor)

"""The pool on Ray: killed and hanging processes."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mixednuts_dist.stages import attack
from mixednuts_dist.stages.progress import RunProgress
from mixednuts_dist.storage.records import PartitionSummary
from tests.helpers.runs import MakeConfig
from tests.helpers.touchy_classifiers import FACTORY, table


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
def test_killed_workers_cost_nothing_but_time(tiny: MakeConfig, tmp_path: Path, ray_executor: Any) -> None:
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
    tiny: MakeConfig, tmp_path: Path, ray_executor: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("mixednuts_dist.distributed.schedule.LEAST_OVERDUE", 2.0)
    monkeypatch.setattr("mixednuts_dist.distributed.pool._LOOK_SECONDS", 0.2)
    (tmp_path / "touchy.py").write_text(FACTORY)
    config = tiny(rob=f"py:{tmp_path}/touchy.py:hanging_once", compute={"num_workers": 2, "num_cpus": 1, "watchdog": 1})
    attack.run(config, executor=ray_executor)
    assert (tmp_path / "mark").exists()
    assert "TimeoutError: not finished after" in caplog.text
    assert sorted(table(config)["sample_id"]) == list(range(24))

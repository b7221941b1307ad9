"""A worker's GPU: its share of memory, its number, and an error if torch cannot use it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mixednuts_dist.cli import main
from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.distributed import gpus, local
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.errors import ClusterError
from tests.helpers.runs import tiny_file
from tests.helpers.worker_specs import unchecked_spec

VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (root@host)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)
"""


@pytest.fixture
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")


@pytest.mark.usefixtures("old_driver")
def test_worker_with_an_unusable_gpu_raises(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"built for CUDA 13\.2 .*the NVIDIA driver is 535\.104\.05: install a newer"
    ):
        AttackWorker(unchecked_spec(tmp_path), n_gpus=1.0).ready()


def test_share_of_a_gpu_limits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    for share in (0.0, 1.0, 0.5, 0.01):
        gpus.keep_to_share(share)
    assert told == [0.5 - 1 / 80, 0.005]
    assert 2 * told[0] * 80 <= 80 - 2, "two workers and their contexts fit"


def test_gpus_that_a_worker_would_not_use_are_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 1"):
        ComputeConfig(num_gpus=2)
    assert ComputeConfig(num_gpus=0.5).num_gpus == 0.5


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs of each process that is started; none of these processes is a worker."""
    seen: list[str] = []
    start = local.subprocess.Popen

    def starts(*command: Any, env: dict[str, str], **options: Any) -> Any:
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        return start(*command, env=env, **options)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(local, "_COMMAND", "import time; time.sleep(60)")
    monkeypatch.setattr(local.subprocess, "Popen", starts)
    return seen


@pytest.mark.parametrize(("share", "expected"), [(1.0, ["2", "5", "2"]), (0.5, ["2", "2", "5"])])
def test_each_local_worker_sees_its_card_alone(
    share: float, expected: list[str], tmp_path: Path, seen: list[str]
) -> None:
    """The command was given two cards; a third worker shares one or takes the next."""
    executor = local.LocalExecutor()
    settings = executor.workers(ComputeConfig(num_gpus=share))
    assert settings.n_workers == 2 / share
    begun = [executor.begin(unchecked_spec(tmp_path), settings) for _ in range(3)]
    assert seen == expected
    for process in begun:
        process.end()


def test_the_replacement_of_an_ended_local_worker_gets_its_gpu(tmp_path: Path, seen: list[str]) -> None:
    """It starts at once, before the reading thread of the ended process has noticed its end."""
    executor, settings = local.LocalExecutor(), PoolSettings(ComputeConfig(), 2, 1.0)
    for _ in range(5):
        kept, ended = (executor.begin(unchecked_spec(tmp_path), settings) for _ in range(2))
        ended.end()
        replacement = executor.begin(unchecked_spec(tmp_path), settings)
        assert seen[-3:] == ["2", "5", "5"]
        kept.end()
        replacement.end()


@pytest.mark.usefixtures("old_driver")
def test_check_says_so_before(tmp_path: Path) -> None:
    config = tiny_file(tmp_path)
    shown = CliRunner().invoke(main, ["check", str(config)])
    assert shown.exit_code == 1
    assert "the NVIDIA driver is 535.104.05" in shown.output
    for_cores = CliRunner().invoke(main, ["check", str(config), "--set", "compute.num_gpus=0"])
    assert "NVIDIA" not in for_cores.output

"""A GPU that torch cannot use is an error with both versions in it, not a silent run on one core."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mixednuts_dist.cli import main
from mixednuts_dist.compute_config import ComputeConfig
from mixednuts_dist.distributed import gpus
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.distributed.worker_spec import WorkerSpec
from mixednuts_dist.errors import ClusterError
from mixednuts_dist.threat import ThreatModel
from tests.conftest import tiny_content

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
def test_a_worker_with_a_gpu_that_torch_cannot_use_refuses_to_start(tmp_path: Path) -> None:
    spec = WorkerSpec(
        store_uri=str(tmp_path), data_uri="digits", std_uri=None, rob_uri="demo:rob", checksums={},
        threat=ThreatModel("Linf", 0.1), seed=0, ln_k=None, batch_size=1, n_threads=1,
    )  # fmt: skip
    with pytest.raises(
        ClusterError, match=r"built for CUDA 13\.2 .*the NVIDIA driver is 535\.104\.05: install a newer"
    ):
        AttackWorker(spec, n_gpus=1.0).ready()


def test_a_part_of_a_gpu_bounds_the_memory_and_a_whole_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    for share in (0.0, 1.0, 0.5, 0.01):
        gpus.keep_to_share(share)
    assert told == [0.5 - 1 / 80, 0.005]
    assert 2 * told[0] * 80 <= 80 - 2, "two workers and their contexts fit"


def test_gpus_that_a_worker_would_not_use_are_refused() -> None:
    with pytest.raises(ValueError, match="2 GPUs a worker: each would hold 2 and compute on one; give 1"):
        ComputeConfig(num_gpus=2)
    assert ComputeConfig(num_gpus=0.5).num_gpus == 0.5


@pytest.mark.usefixtures("old_driver")
def test_check_says_so_before(tmp_path: Path) -> None:
    import yaml

    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_content(tmp_path / "runs")))
    shown = CliRunner().invoke(main, ["check", str(config)])
    assert shown.exit_code == 1
    assert "the NVIDIA driver is 535.104.05" in shown.output
    for_cores = CliRunner().invoke(main, ["check", str(config), "--set", "compute.num_gpus=0"])
    assert "NVIDIA" not in for_cores.output


def test_a_machine_without_a_driver_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "nowhere")
    assert gpus.nvidia_driver() is None
    assert "no NVIDIA driver is loaded" in gpus.unusable_gpu()

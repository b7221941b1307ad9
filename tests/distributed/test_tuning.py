"""The search as a Ray Tune job: the scores are those of the driver to the bit, and failed trials are run again."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.distributed import ray_executor as ray_executor_module
from mixednuts_dist.distributed import tuning
from mixednuts_dist.distributed.executor import PoolSettings
from mixednuts_dist.errors import ClusterError
from mixednuts_dist.selection.criteria import ExactCriterion, Scores
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.inputs import CachedLogits
from mixednuts_dist.selection.selection import score_candidates
from tests.helpers.worker_specs import unchecked_spec

GRID = Grid((0.1, 0.6, 2.0), (1.0, 2.5), (-1.2, -0.6, -0.3, 0.4), (1.0, 0.9, 0.5))


def rows(n_images: int = 80, n_classes: int = 10) -> CachedLogits:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(n_classes, (n_images,), generator=generator)
    clean = torch.randn(n_images, n_classes, generator=generator)
    clean[torch.arange(n_images), labels] += 2
    attacked = clean.clone()
    attacked[torch.arange(n_images), labels] -= 1
    std = torch.randn(n_images, n_classes, generator=generator)
    std[torch.arange(n_images), labels] += 3
    return CachedLogits(clean, attacked, labels, std_pred_B=std.argmax(dim=1))


def expected(grid: Grid) -> Scores:
    return score_candidates(ExactCriterion.from_rows(rows(), clamp=grid.clamp, ln_k=grid.ln_k), grid)


def scored_on_tune(folder: Path, executor: Any, grid: Grid, **compute: Any) -> Scores:
    scoring = executor.scoring(unchecked_spec(folder), ComputeConfig(**compute), rows(), "exact")
    found: Scores = scoring(grid)
    return found


@pytest.mark.alone
def test_a_tune_job_has_the_scores_of_the_driver_to_the_bit(
    tmp_path: Path, ray_executor: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    grid = replace(GRID, clamp="relu", ln_k=5)
    for part, wanted in zip(scored_on_tune(tmp_path, ray_executor, grid), expected(grid), strict=True):
        assert torch.equal(part.nan_to_num(7), wanted.nan_to_num(7))
    assert "Trial" not in capfd.readouterr().out
    (job,) = (tmp_path / "search" / "tune").glob(f"{tmp_path.name}-*")
    (state,) = job.glob("experiment_state-*.json")
    assert len(json.loads(state.read_text())["trial_data"]) == 2


@pytest.mark.alone
def test_a_killed_trial_is_run_again(tmp_path: Path, ray_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial kills its own process the first time, as Linux does if memory runs out."""

    score_power = tuning.score_power

    def killed_once(config: dict[str, float], **given: Any) -> None:
        mark = tmp_path / f"killed-{config['power']}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        score_power(config, **given)

    monkeypatch.setattr(tuning, "score_power", killed_once)
    grid = replace(GRID, biases=(-0.6, 0.4))
    found = scored_on_tune(tmp_path, ray_executor, grid)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert torch.equal(found.counts, expected(grid).counts)


@pytest.mark.alone
def test_a_search_that_no_node_takes_ends_after_start_seconds(tmp_path: Path, ray_executor: Any) -> None:
    with pytest.raises(ClusterError, match="no trial of the search could start for 2 s"):
        scored_on_tune(tmp_path, ray_executor, GRID, num_cpus=1000, start_seconds=2)


@pytest.mark.alone
def test_search_keeps_idle_workers_that_hold_all_cores(tmp_path: Path, ray_executor: Any) -> None:
    compute = ComputeConfig(num_cpus=ray.cluster_resources()["CPU"])
    spec, settings = unchecked_spec(tmp_path), PoolSettings(compute, 1, 0)
    ray_executor.n_users += 1  # as in `executing`
    worker = ray_executor.begin(spec, settings)
    try:
        place = worker.call("locate").result()
        ray_executor.release(spec, settings, worker)
        grid = replace(GRID, powers=(1.0,), biases=(-0.6, 0.4))
        found = scored_on_tune(tmp_path, ray_executor, grid)
        assert torch.equal(found.counts, expected(grid).counts)
        assert ray_executor.kept(spec, settings) is worker
        assert worker.call("locate").result() == place
    finally:
        worker.end()
        ray_executor.n_users -= 1


@pytest.mark.parametrize(
    ("nodes", "memory"), [([(4, 8e9)], 2e9), ([(4, 8e9), (8, 8e9)], 1e9), ([(4, 8e9), (0, 9e9)], 0), ([(4, 0)], 0)]
)
def test_trials_reserve_memory_only_if_all_nodes_have_cores(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[int, float]], memory: float
) -> None:
    shown = [{"Alive": True, "Resources": {"CPU": n_cpus, "memory": size}} for n_cpus, size in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: shown)
    assert ray_executor_module._memory_per_core() == memory

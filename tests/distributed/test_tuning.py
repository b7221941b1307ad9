"""The search as a Ray Tune job: the scores are those of the driver to the bit, and failed trials are run again."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist.config.compute_config import ComputeConfig
from mixednuts_dist.distributed import tuning
from mixednuts_dist.distributed.search_inputs import SearchInputs, SearchTask
from mixednuts_dist.errors import ClusterError
from mixednuts_dist.selection.criteria import Scores
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.selection import score_candidates

GRID = Grid((0.1, 0.6, 2.0), (1.0, 2.5), (-1.2, -0.6, -0.3, 0.4), (1.0, 0.9, 0.5))
PAIRS = (("gelu", None), ("relu", None), ("gelu", 5))


def inputs(n_images: int = 80, n_classes: int = 10) -> SearchInputs:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(n_classes, (n_images,), generator=generator)
    clean = torch.randn(n_images, n_classes, generator=generator)
    clean[torch.arange(n_images), labels] += 2
    attacked = clean.clone()
    attacked[torch.arange(n_images), labels] -= 1
    std = torch.randn(n_images, n_classes, generator=generator)
    std[torch.arange(n_images), labels] += 3
    return SearchInputs(labels.numpy(), std.numpy(), clean.numpy(), attacked.numpy())


def grids() -> list[Grid]:
    return [replace(GRID, clamp=clamp, ln_k=ln_k) for clamp, ln_k in PAIRS]


def scored_on_tune(folder: Path, executor: Any, given: list[Grid], **compute: Any) -> list[Scores]:
    scoring = executor.scoring(inputs(), SearchTask(str(folder), "0123abcd", "exact"), ComputeConfig(**compute))
    return scoring(given)


@pytest.mark.alone
def test_a_tune_job_has_the_scores_of_the_driver_to_the_bit(
    tmp_path: Path, ray_executor: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    others = [replace(grid, powers=(2.0,), biases=(0.0,)) for grid in grids()[:1]]
    given = [*grids(), *others]
    found = scored_on_tune(tmp_path, ray_executor, given)
    for grid, scores in zip(given, found, strict=True):
        expected = score_candidates(inputs().criterion("exact", *grid.pair), grid)
        for part, wanted in zip(scores, expected, strict=True):
            assert torch.equal(part.nan_to_num(7), wanted.nan_to_num(7))
    assert "Trial" not in capfd.readouterr().out
    assert len(list((tmp_path / "search" / "tune").glob("0123abcd-*/score_trial_*"))) == 3 * 8 + 1


@pytest.mark.alone
def test_a_killed_trial_is_run_again(tmp_path: Path, ray_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial kills its own process the first time, as Linux does if memory runs out."""
    whole = tuning.score_trial

    def killed_once(config: dict[str, Any], inputs: SearchInputs, task: SearchTask, grids: Sequence[Grid]) -> None:
        mark = Path(task.store_uri) / f"killed-{config['power']}-{config['bias']}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        whole(config, inputs, task, grids)

    monkeypatch.setattr(tuning, "score_trial", killed_once)
    grid = replace(GRID, powers=(1.0,), biases=(-0.6, 0.4))
    (found,) = scored_on_tune(tmp_path, ray_executor, [grid])
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert torch.equal(found.counts, score_candidates(inputs().criterion("exact", *grid.pair), grid).counts)


@pytest.mark.alone
def test_a_search_that_no_node_takes_ends_after_start_seconds(tmp_path: Path, ray_executor: Any) -> None:
    with pytest.raises(ClusterError, match="no trial of the search could start for 2 s"):
        scored_on_tune(tmp_path, ray_executor, [GRID], num_cpus=1000, start_seconds=2)

"""Measure the seconds of Algorithm 1 as a Ray Tune job and in the driver.

Run `python -m benchmarks.tuning`. Two sizes are measured: the demo with 10 classes and 450 images, and ImageNet with
1000 classes and 5,000 images. Both use the paper's grid of 8 x 8 x 8 and the default betas. A private Ray cluster with
one trial per core scores the grid. The first Tune job includes the start of the trials' processes. The scores are
compared bit by bit.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mixednuts_dist.config.keys import ComputeConfig, SearchConfig
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.uris import DatasetSource
from mixednuts_dist.distributed.executor import Executor
from mixednuts_dist.distributed.ray_executor import RayExecutor
from mixednuts_dist.distributed.worker_spec import WorkerSpec
from mixednuts_dist.selection.choice import published_grid
from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.inputs import CachedLogits
from mixednuts_dist.selection.selection import score_candidates

BETAS = SearchConfig().betas
SIZES = {"demo": (450, 10), "ImageNet": (5000, 1000)}


def run(sizes: dict[str, tuple[int, int]] = SIZES) -> dict[str, dict[str, float]]:
    """Print one line per size and return the seconds."""
    with RayExecutor() as executor, tempfile.TemporaryDirectory() as folder:
        executor.start()
        return {name: _measured(name, size, executor, folder) for name, size in sizes.items()}


def _measured(name: str, size: tuple[int, int], executor: Executor, folder: str) -> dict[str, float]:
    rows, grid = _rows(*size), replace(published_grid("cifar10" if size[1] == 10 else "imagenet"), betas=BETAS)
    spec = WorkerSpec(folder, DatasetSource(""), ThreatModel("Linf", 0.1), {})
    scoring = executor.scoring(spec, ComputeConfig(), rows, "exact")
    assert scoring is not None
    driver_s, here = _timed(
        lambda: score_candidates(ExactCriterion.from_rows(rows, clamp=grid.clamp, ln_k=grid.ln_k), grid)
    )
    first_s, there = _timed(lambda: scoring(grid))
    second_s, _ = _timed(lambda: scoring(grid))
    same = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(here, there, strict=True))
    print(
        f"{name}: driver {driver_s:.1f} s, first Tune job {first_s:.1f} s, second {second_s:.1f} s; "
        f"the scores are {'equal' if same else 'DIFFERENT'}"
    )
    return {"driver_s": driver_s, "first_job_s": first_s, "second_job_s": second_s}


def _timed(task: Callable[[], Any]) -> tuple[float, Any]:
    started, result = time.perf_counter(), task()
    return time.perf_counter() - started, result


def _rows(n_images: int, n_classes: int) -> CachedLogits:
    """Return noise with the label's logit lifted, more for clean images than for attacked ones."""
    generator = torch.Generator().manual_seed(0)
    labels_B = torch.randint(n_classes, (n_images,), generator=generator)
    lifts = torch.nn.functional.one_hot(labels_B, n_classes)
    clean_BK, std_BK = torch.randn(2, n_images, n_classes, generator=generator) + 4 * lifts
    return CachedLogits(clean_BK, clean_BK - lifts, labels_B, std_pred_B=(std_BK + lifts).argmax(dim=1))


if __name__ == "__main__":
    run()

"""The search as a Tune job: the scores are those of one process, and a killed driver's slabs are not scored again."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mixednuts_dist.distributed.slabs import SearchInputs, SearchTask, delete_slabs
from mixednuts_dist.distributed.tuning import SlabTuner
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.choice import Choice
from mixednuts_dist.selection.criteria import Scores
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.selection import score_candidates
from mixednuts_dist.storage.store import Store

GRID = Grid((0.1, 0.6, 2.0), (1.0, 2.5), (-1.2, -0.6, -0.3, 0.4), (1.0, 0.9, 0.5))
PAIRS = (("gelu", None), ("relu", None), ("gelu", 5))
WAIT_SECONDS = 400


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


def task(folder: Path) -> SearchTask:
    return SearchTask(str(folder), "0123abcd", "exact")


def assert_scores(found: list[Scores]) -> None:
    """They are those of one process without Ray."""
    for grid, scores in zip(grids(), found, strict=True):
        expected = score_candidates(inputs().criterion("exact", *grid.pair), grid)
        torch.testing.assert_close(scores.log_cutoffs, expected.log_cutoffs, rtol=1e-12, atol=0)
        assert torch.equal(scores.counts, expected.counts)
        assert torch.equal(scores.kept, expected.kept)


def slab_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "search").glob("slab-*.safetensors")}


@pytest.mark.alone
@pytest.mark.usefixtures("ray_executor")
def test_scores_are_those_of_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(grids()))
    first = slab_files(tmp_path)
    assert len(first) == 12
    (tmp_path / "search" / min(first)).write_bytes(b"damaged")
    (tmp_path / "search" / max(first)).unlink()
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(grids()))
    second = slab_files(tmp_path)
    assert {name for name in first if first[name] != second[name]} == {min(first), max(first)}
    delete_slabs(Store(str(tmp_path)))
    assert not slab_files(tmp_path)
    assert "Trial" not in capfd.readouterr().out


DRIVER = """
import sys, time
from pathlib import Path
from mixednuts_dist.distributed import tuning
from mixednuts_dist.distributed.executor import make_executor
from tests.distributed.test_tuning import inputs, grids, task

class Slow(tuning.SlabTrial):
    def step(self):
        result = super().step()
        time.sleep(0.5)
        return result

tuning.SlabTrial = Slow
with make_executor('ray') as executor:
    executor.start()
    tuning.SlabTuner(inputs(), task(Path(sys.argv[1]))).scores(grids())
"""


@pytest.mark.alone
@pytest.mark.usefixtures("ray_executor")
def test_a_killed_drivers_slabs_are_not_scored_again(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=Path(__file__).parents[2], start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )  # fmt: skip
    deadline = time.monotonic() + WAIT_SECONDS
    while not slab_files(tmp_path) and time.monotonic() < deadline:
        assert driver.poll() is None, "the driver ended before its first slab"
        time.sleep(0.01)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    left = slab_files(tmp_path)
    assert 0 < len(left) < 12
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(grids()))
    finished = slab_files(tmp_path)
    assert len(finished) == 12
    assert {name: finished[name] for name in left} == left


def test_an_entry_deploys_its_own_clamp_and_width() -> None:
    """Those of the whole result are only for show."""
    entry = Choice(beta=0.9, scale=0.6, power=2.0, bias=-0.5, alpha=0.75, one_minus_alpha=0.25, clamp="relu", ln_k=5)
    assert entry.mixture().transform.settings() == LogitTransform(0.6, 2.0, -0.5, "relu", 5).settings()

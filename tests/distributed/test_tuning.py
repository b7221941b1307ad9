"""The search as a Tune job: the scores are those of one process, and a killed driver's slabs are not scored again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mixednuts_dist.distributed.optuna_rounds import OptunaRounds
from mixednuts_dist.distributed.slabs import SearchInputs, SearchTask, delete_slabs
from mixednuts_dist.distributed.tuning import SlabTuner
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.candidates import CandidateGrid
from mixednuts_dist.selection.exploration import Exploration, Explored, Subgrid
from mixednuts_dist.selection.selection import score_candidates
from mixednuts_dist.storage.records import SelectedParameters
from mixednuts_dist.storage.store import Store

GRID = CandidateGrid((0.1, 0.6, 2.0), (1.0, 2.5), (-1.2, -0.6, -0.3, 0.4), (1.0, 0.9, 0.5))
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


def subgrids() -> list[Subgrid]:
    return [Subgrid(clamp, ln_k, 0, GRID) for clamp, ln_k in PAIRS]


def task(folder: Path) -> SearchTask:
    return SearchTask(str(folder), "0123abcd", "exact")


def assert_scores(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """They are those of one process without Ray."""
    for subgrid, (log_cutoffs, counts) in zip(subgrids(), found, strict=True):
        expected = score_candidates(inputs().criterion("exact", *subgrid.pair), GRID)
        torch.testing.assert_close(log_cutoffs, expected[0], rtol=1e-12, atol=0)
        assert torch.equal(counts, expected[1])


def slab_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "search").glob("slab-*.safetensors")}


@pytest.mark.usefixtures("ray_session")
def test_scores_are_those_of_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(subgrids()))
    first = slab_files(tmp_path)
    assert len(first) == 12
    (tmp_path / "search" / min(first)).write_bytes(b"damaged")
    (tmp_path / "search" / max(first)).unlink()
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(subgrids()))
    second = slab_files(tmp_path)
    assert {name for name in first if first[name] != second[name]} == {min(first), max(first)}
    delete_slabs(Store(str(tmp_path)))
    assert not slab_files(tmp_path)
    assert "Trial" not in capfd.readouterr().out


DRIVER = """
import sys, time
from pathlib import Path
from mixednuts_dist.distributed import slabs, tuning
from mixednuts_dist.distributed.cluster import connected
from tests.distributed.test_tuning import inputs, subgrids, task

class Slow(tuning.SlabTrial):
    def step(self):
        result = super().step()
        time.sleep(0.5)
        return result

tuning.SlabTrial = Slow
with connected(None):
    tuning.SlabTuner(inputs(), task(Path(sys.argv[1]))).scores(subgrids())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
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
    assert_scores(SlabTuner(inputs(), task(tmp_path)).scores(subgrids()))
    finished = slab_files(tmp_path)
    assert len(finished) == 12
    assert {name: finished[name] for name in left} == left


def optuna_search(seed: int, *, n_trials: int = 20) -> Exploration:
    """All rounds, without Ray."""
    criteria = {pair: inputs().criterion("exact", *pair) for pair in PAIRS}
    rounds = OptunaRounds(GRID, PAIRS, beta=0.9, n_trials=n_trials, seed=seed, maximised=True)
    exploration = Exploration(PAIRS)
    while proposed := rounds.propose(exploration):
        exploration = exploration.with_parts(
            Explored.of(subgrid, criteria[subgrid.pair], *score_candidates(criteria[subgrid.pair], subgrid.grid))
            for subgrid in proposed
        )
    return exploration


def test_an_entry_deploys_its_own_clamp_and_width() -> None:
    """Those of the whole result are only for show."""
    entry = SelectedParameters(
        beta=0.9, scale=0.6, power=2.0, bias=-0.5, alpha=0.75, one_minus_alpha=0.25, cutoff=1 / 3, objective=0.5,
        clean_correct=5, robust_correct_bound=4, total=10, on_grid_edge=(), clamp="relu", ln_k=5, round=1,
        clean_interval=(0.2, 0.8), robust_interval=(0.1, 0.7),
    )  # fmt: skip
    assert entry.transform().settings() == LogitTransform(0.6, 2.0, -0.5, "relu", 5).settings()


def test_optuna_proposes_by_the_seed_alone_and_within_the_ranges() -> None:
    found, again, other = optuna_search(0), optuna_search(0), optuna_search(1)
    proposed = [part.subgrid for part in found.parts]
    assert proposed == [part.subgrid for part in again.parts] != [part.subgrid for part in other.parts]
    assert [subgrid.round for subgrid in proposed] == [0] * 8 + [1] * 8 + [2] * 4
    for subgrid in proposed:
        assert subgrid.grid.scales == GRID.scales
        assert 1.0 <= subgrid.grid.powers[0] <= 2.5
        assert -1.2 <= subgrid.grid.biases[0] <= 0.4
    assert {subgrid.pair for subgrid in proposed} == set(PAIRS)
    best = found.choice(0.9)
    assert best is not None
    counts = [part.selection.chosen[1].objective_count for part in found.parts if part.selection.chosen[1]]
    assert best.candidate.objective_count == max(counts)

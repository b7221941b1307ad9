"""The benchmarks of distribution and scale at a size that a test can afford; the simulated tail at its full one."""

from pathlib import Path

import pytest

from benchmarks import distribution, scale
from benchmarks.simulation import simulate
from mixednuts_dist.attacks.budget import AttackBudget

# Passes of 12 digits as `count_passes` gives them: two thirds survive.
PASSES = [1012, 2, 2, 107, 1012, 4, 1012, 2, 2, 1012, 1012, 1012]


def test_tail_shrinks_with_smaller_partitions() -> None:
    found = distribution.tail(PASSES)
    unknown = {name: case["costs_unknown"] for name, case in found.items() if "partitions" in name}
    assert list(unknown) == [f"{n} images, partitions of {size}" for n in (5000, 10000, 50000) for size in (32, 16)]
    large, small = list(unknown.values())[::2], list(unknown.values())[1::2]
    assert large == sorted(large, reverse=True) and small == sorted(small, reverse=True)
    assert all(few < many for few, many in zip(small, large, strict=True))
    assert 0 <= large[-1] < 0.05
    assert large[0] < 0.4


def test_the_simulation_agrees_with_pencil_and_paper() -> None:
    # Two workers, four partitions of 10 images of 1 s: two each, and 0.2 s per partition.
    outcome = simulate([1.0] * 40, [1.0, 1.0], partition_size=10)
    assert outcome.n_partitions == 4
    assert outcome.ideal == 20
    assert outcome.makespan == pytest.approx(20.4)
    # A faster worker takes more: 3 x 4.08 s against 1 x 10.2 s.
    assert simulate([1.0] * 40, [1.0, 2.5], partition_size=10).makespan == pytest.approx(12.24)


def test_prefetched_partitions_take_free_slots() -> None:
    found = distribution.occupancy(96, 16, 16, AttackBudget(n_iter=4, n_target_classes=2, n_queries=20))
    assert 0 < found["alone"] < found["2 prefetched"] < 1


def test_passes_are_counted_on_the_packaged_pair() -> None:
    passes = distribution.count_passes(n_images=4, n_iter=3)
    assert max(passes) >= 4 * 10
    assert min(passes) >= 1


@pytest.mark.soak
def test_scale_measures_every_command(tmp_path: Path) -> None:
    found = scale.run(400, str(tmp_path))
    assert found["partitions"] == 4
    assert all(
        found[step]["seconds"] > 0 for step in ("status", "search", "status_of_all", "report", "resume", "verify")
    )

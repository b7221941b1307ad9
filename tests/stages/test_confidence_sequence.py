"""The bounds hold at all looks together at their level, and narrow at the expected rate."""

import math
from typing import Any

import numpy as np
import pytest

from mixednuts_dist.stages.confidence_sequence import ConfidenceSequence

TIMES = 200  # simulated evaluations


def shares(name: str, draw: np.random.Generator, n: int = 40) -> np.ndarray[Any, Any]:
    """Shares of robust images of n partitions."""
    if name == "images":  # partitions of one image: nothing varies more
        return (draw.random(n) < 0.6).astype(float)
    if name == "sorted":  # by class, as a folder's images are: partitions are alike inside and differ among themselves
        return np.clip(np.linspace(0.1, 0.9, n) + 0.05 * draw.standard_normal(n), 0, 1)
    return draw.binomial(100, 0.97, n) / 100


@pytest.mark.parametrize("name", ["images", "sorted", "shuffled"])
def test_confidence_sequence_covers_the_mean_at_all_times(name: str) -> None:
    """A miss at any of the looks counts. 0.95 less three standard errors of 200 simulations is 0.904."""
    draw = np.random.default_rng(7)
    held = 0
    for _ in range(TIMES):
        values = draw.permutation(shares(name, draw))
        mean, bounds, inside = float(values.mean()), ConfidenceSequence(len(values), alpha=0.05), True
        for value in values.tolist():
            bounds.add(value)
            low, high = bounds.interval
            inside &= low - 1e-9 <= mean <= high + 1e-9
        held += inside
        assert sum(bounds.interval) / 2 == pytest.approx(mean) or not inside  # all are seen
    assert held / TIMES >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / TIMES)


def test_without_replacement_is_what_makes_the_bounds_meet() -> None:
    """Three quarters of a finite set bound its mean more tightly than as many samples of an infinite one."""
    values = np.random.default_rng(3).permutation(shares("sorted", np.random.default_rng(3), 400)).tolist()
    few, endless = ConfidenceSequence(400), ConfidenceSequence(10**9)
    for value in values[:300]:
        few.add(value)
        endless.add(value)
    widths = [high - low for low, high in (few.interval, endless.interval)]
    assert widths[0] < 0.8 * widths[1]


def test_fifth_of_ten_thousand_partitions_bounds_half_a_point() -> None:
    """A million images in shuffled partitions of 100."""
    draw = np.random.default_rng(1)
    values = draw.binomial(100, 0.6, 10_000) / 100
    bounds = ConfidenceSequence(10_000)
    while bounds.interval[1] - bounds.interval[0] > 0.01:
        bounds.add(float(values[bounds.n_seen]))
    assert bounds.n_seen <= 2000
    assert bounds.interval[0] <= values.mean() <= bounds.interval[1]

"""The bounds hold at all looks together at their level, and narrow at the expected rate."""

import math
from typing import Any

import numpy as np
import pytest

from mixednuts_dist.attacks.sequential import ConfidenceSequence

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
            bounds.add([value])
            low, high = bounds.interval
            inside &= low - 1e-9 <= mean <= high + 1e-9
        held += inside
        assert sum(bounds.interval) / 2 == pytest.approx(mean) or not inside  # all are seen
    assert held / TIMES >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / TIMES)


def test_without_replacement_is_what_makes_the_bounds_meet() -> None:
    """Three quarters of a finite set bound its mean more tightly than as many samples of an infinite one."""
    values = np.random.default_rng(3).permutation(shares("sorted", np.random.default_rng(3), 400)).tolist()
    few, endless = ConfidenceSequence(400), ConfidenceSequence(10**9)
    for bounds in (few, endless):
        bounds.add(values[:300])
    widths = [high - low for low, high in (few.interval, endless.interval)]
    assert widths[0] < 0.8 * widths[1]


def test_fifth_of_ten_thousand_partitions_bounds_half_a_point() -> None:
    """A million images in shuffled partitions of 100, with a look after each hundred partitions."""
    draw = np.random.default_rng(1)
    values = draw.binomial(100, 0.6, 10_000) / 100
    bounds, n = ConfidenceSequence(10_000), 0
    while bounds.interval[1] - bounds.interval[0] > 0.01:
        bounds.add(values[n : n + 100].tolist())
        n += 100
    assert n <= 2000
    assert bounds.interval[0] <= values.mean() <= bounds.interval[1]


def test_the_looks_change_nothing() -> None:
    """Values one by one or all at once: the same capital, and at most a tighter interval from having looked earlier."""
    values = np.random.default_rng(0).random(50).tolist()
    once, often = ConfidenceSequence(100), ConfidenceSequence(100)
    once.add(values)
    for value in values:
        often.add([value])
    assert once.interval[0] <= often.interval[0] <= often.interval[1] <= once.interval[1]
    assert np.array_equal(once._log_up_G, often._log_up_G)

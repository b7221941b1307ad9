"""Counts with their Wilson intervals, and differences between two outcomes on the same images."""

import pytest
import torch

from mixednuts_dist.reports.counts import compared, paired_interval, wilson_interval


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [  # published examples (Newcombe 1998, table I: 81/263, 15/148, 0/20, 1/29), without continuity correction
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_matches_published_values(correct: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("total", [1, 7, 300])
def test_holds_the_share_and_is_symmetric_in_right_and_wrong(total: int) -> None:
    for correct in range(total + 1):
        low, high = wilson_interval(correct, total)
        assert 0 <= low <= correct / total <= high <= 1
        assert high > low
        assert wilson_interval(total - correct, total) == pytest.approx((1 - high, 1 - low))


def test_the_interval_is_that_of_paired_images() -> None:
    # 20 of 200 images; the variance of a difference of -1, 0 and 1 is 0.2 - 0.1 ** 2.
    spread = 1.959964 * (0.19 / 200) ** 0.5
    assert paired_interval(30, 10, 200) == pytest.approx((100 * (0.1 - spread), 100 * (0.1 + spread)))


@pytest.mark.parametrize(
    ("counts", "words"),
    [((30, 10), "a significant difference"), ((3, 2), "no significant difference"), ((0, 0), "both are right on the")],
)
def test_a_sentence_says_whether_it_is_more_than_chance(counts: tuple[int, int], words: str) -> None:
    place_N = torch.arange(200)
    first, second = (place_N < 100 + counts[0]), (place_N < 100) | (place_N >= 200 - counts[1])
    sentence = compared("Robust", ("this", first), ("that", second))
    assert words in sentence
    assert f"this {100 + counts[0]} of 200" in sentence

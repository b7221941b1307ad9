"""Differences between two outcomes on the same images."""

import pytest
import torch

from mixednuts_dist.reports.counts import compared, difference_interval


def outcomes(only_first: int, only_second: int, both: int, neither: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = [True] * only_first + [False] * only_second + [True] * both + [False] * neither
    second = [False] * only_first + [True] * only_second + [True] * both + [False] * neither
    return torch.tensor(first), torch.tensor(second)


def test_the_interval_is_that_of_paired_images() -> None:
    low, high = difference_interval(*outcomes(30, 10, 100, 60))
    # 20 of 200 images; the variance of a difference of -1, 0 and 1 is 0.2 - 0.1 ** 2.
    spread = 1.959964 * (0.19 / 200) ** 0.5
    assert (low, high) == pytest.approx((100 * (0.1 - spread), 100 * (0.1 + spread)))


@pytest.mark.parametrize(
    ("counts", "words"),
    [((30, 10, 100, 60), "a significant difference"), ((3, 2, 100, 95), "no significant difference"),
     ((0, 0, 100, 100), "both are right on the same images")],
)  # fmt: skip
def test_a_sentence_says_whether_it_is_more_than_chance(counts: tuple[int, int, int, int], words: str) -> None:
    first, second = outcomes(*counts)
    sentence = compared("Robust", ("this", first), ("that", second))
    assert words in sentence
    assert f"this {int(first.sum())} of 200" in sentence

"""Counts of images, and two outcomes on the same images held against each other.

Shapes: N images.
"""

import math

from torch import Tensor

from ..reports.intervals import Z_95, Count
from ..reports.wording import share_text


def count(hits_N: Tensor) -> Count:
    """How many are True."""
    return Count(int(hits_N.sum()), hits_N.numel())


def difference_interval(first_N: Tensor, second_N: Tensor) -> tuple[float, float]:
    """95 % interval, in points, of the share of `first` minus that of `second` on the same images (paired, Wald)."""
    total = first_N.numel()
    only_first, only_second = int((first_N & ~second_N).sum()), int((second_N & ~first_N).sum())
    difference = (only_first - only_second) / total
    spread = Z_95 * math.sqrt(max(0.0, (only_first + only_second) / total - difference**2) / total)
    return 100 * (difference - spread), 100 * (difference + spread)


def compared(what: str, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> str:
    """One sentence: both counts, on how many images they differ, and whether that is more than chance."""
    (first_name, first_N), (second_name, second_N) = first, second
    counts = f"{what}: {first_name} {share_text(count(first_N))}, {second_name} {share_text(count(second_N))}"
    only_first, only_second = int((first_N & ~second_N).sum()), int((second_N & ~first_N).sum())
    if not only_first + only_second:
        return f"{counts}; no image differs."
    low, high = difference_interval(first_N, second_N)
    verdict = "no difference is shown" if low <= 0 <= high else "a difference is shown"
    return (
        f"{counts}; {only_first} images are right only for {first_name}, {only_second} only for {second_name}: "
        f"{100 * (only_first - only_second) / first_N.numel():+.2f} points, 95 % interval [{low:.2f}, {high:.2f}], "
        f"{verdict}."
    )

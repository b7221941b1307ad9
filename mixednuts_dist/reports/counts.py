"""Count images with 95% intervals, and write numbers for the terminal, the page and LaTeX.

Shapes: N images. All commands import this module, so it imports neither PyTorch nor modules that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..storage.records import PartitionSummary

COUNTED = ("correct", "total", "percent", "low", "high")
Z_95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share, as two fractions in [0, 1].

    It solves |share - p| = z sqrt(p (1 - p) / total) for p. Unlike `share ± z sqrt(share (1 - share) / total)` it stays
    inside [0, 1] and has a width even if no image, or every image, is correct.

    >>> [round(edge, 4) for edge in wilson_interval(0, 1000)]
    [0.0, 0.0038]
    """
    share, z = correct / total, Z_95
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    centre = share + z * z / (2 * total)
    scale = 1 + z * z / total
    low = 0.0 if correct == 0 else (centre - spread) / scale
    high = 1.0 if correct == total else (centre + spread) / scale
    return low, high


@dataclass(frozen=True)
class Count:
    """`correct` of `total` images, with the percentages that follow from it."""

    correct: int
    total: int
    resampled: tuple[float, float] | None = None  # a 95% interval instead of Wilson's

    @property
    def percent(self) -> float:
        """Return the share in percent; 0 if there are no images."""
        return 100 * self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% interval in percent; (0, 100) if there are no images."""
        if self.resampled is not None:
            return self.resampled
        low, high = wilson_interval(self.correct, self.total) if self.total else (0.0, 1.0)
        return 100 * low, 100 * high

    @property
    def low(self) -> float:
        """Return the lower end of the interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """Return the upper end of the interval."""
        return self.interval[1]

    @property
    def decimals(self) -> int:
        """Return 1, or 2 from 1000 images on, because neighboring counts may then agree in the first decimal."""
        return 1 if self.total < 1000 else 2

    def to_json(self) -> dict[str, Any]:
        """Return `correct`, `total`, `percent`, `low` and `high` (the last three in percent)."""
        return {name: getattr(self, name) for name in COUNTED}


def count(hits_N: Tensor) -> Count:
    """Count the True entries."""
    return Count(int(hits_N.sum()), hits_N.numel())


def outcome_counts(summaries: Sequence[PartitionSummary]) -> tuple[Count, Count]:
    """Return the clean and robust counts over these partitions."""
    total = sum(summary.n_images for summary in summaries)
    clean = sum(summary.clean_correct for summary in summaries)
    return Count(clean, total), Count(sum(summary.robust for summary in summaries), total)


def device_hours(summaries: Sequence[PartitionSummary]) -> tuple[float, float]:
    """Return the core-hours on CPUs and the accelerator-hours; a share of an accelerator counts as a fraction."""
    held = [(each.device == "cpu", each.n_devices * each.seconds / 3600) for each in summaries]
    return sum(hours for on_cpu, hours in held if on_cpu), sum(hours for on_cpu, hours in held if not on_cpu)


def paired_interval(only_first: int, only_second: int, total: int) -> tuple[float, float]:
    """Return the 95% Wald interval of the difference of two accuracies on the same images, in points.

    The difference of one image is -1, 0 or 1; its variance is the share of images that differ minus the squared mean.

    Args:
        only_first, only_second: the images that only one of the two classifiers has right.
    """
    difference = (only_first - only_second) / total
    spread = Z_95 * math.sqrt(max(0.0, (only_first + only_second) / total - difference**2) / total)
    return 100 * (difference - spread), 100 * (difference + spread)


def compared(what: str, first: tuple[str, Tensor], second: tuple[str, Tensor]) -> str:
    """Compare two classifiers in one sentence: counts, images that differ, and significance."""
    (first_name, first_N), (second_name, second_N) = first, second
    counts = f"{what}: {first_name} {share_text(count(first_N))}, {second_name} {share_text(count(second_N))}"
    only_first, only_second = int((first_N & ~second_N).sum()), int((second_N & ~first_N).sum())
    if not only_first + only_second:
        return f"{counts}; both are right on the same images."
    low, high = paired_interval(only_first, only_second, first_N.numel())
    shown = "no significant difference" if low <= 0 <= high else "a significant difference"
    sides = [
        f"{images_text(n)} right only for {name}"
        for n, name in ((only_first, first_name), (only_second, second_name))
        if n
    ]
    return (
        f"{counts}; {', '.join(sides)}: {points_text(100 * (only_first - only_second) / first_N.numel())}, "
        f"95% interval [{minus(f'{low:.2f}')}, {minus(f'{high:.2f}')}], {shown}."
    )


def percent_text(shown: Count) -> str:
    """Write the percentage as in `77.3`, with the decimals of the count."""
    return f"{shown.percent:.{shown.decimals}f}"


def interval_text(shown: Count) -> str:
    """Write the interval as in `[74.6, 79.8]`, in percent, with the decimals of the count."""
    low, high = shown.interval
    return f"[{low:.{shown.decimals}f}, {high:.{shown.decimals}f}]"


def share_text(shown: Count) -> str:
    """Write a count, as in `773 of 1000 (77.30%)`."""
    return f"{shown.correct} of {shown.total} ({percent_text(shown)}%)" if shown.total else "0 of 0"


def minus(number: str) -> str:
    """Write a number with a true minus sign, and without a sign if it rounds to zero."""
    plain = number.removeprefix("+").removeprefix("-")
    return plain if not plain.strip("0.") else number.replace("-", "−")


def points_text(points: float) -> str:
    """Write a difference as in `+1.25 points`, `−0.50 points` or `0.00 points`."""
    return f"{minus(f'{points:+.2f}')} points"


def images_text(n: int) -> str:
    """Write a number of images as in `1 image`, `no images` or `12 images`."""
    return "1 image" if n == 1 else f"{n or 'no'} images"


class Seconds(float):
    """A time in a table: `12 min 05 s` for people, unrounded seconds in CSV."""


def seconds_text(seconds: float) -> str:
    """Write a time as in `0.25 s`, `41.3 s`, `12 min 05 s` or `3 h 20 min`."""
    if seconds < 0.95:
        return f"{seconds:.2g} s" if seconds >= 0.0005 else "0 s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def held_text(hours: float, device: str) -> str:
    """Write a cost as in `1.5 GPU-hours` or `3.2 core-minutes`, in the largest unit that gives at least 1."""
    units = (("hour", 1), ("minute", 60), ("second", 3600))
    unit, size = next((unit for unit in units if hours * unit[1] >= 1), units[-1])
    number = f"{hours * size:,.0f}" if hours * size >= 9.95 else f"{hours * size:.2g}"
    return f"{number} {device}-{unit}{'' if number == '1' else 's'}"


def weight_text(alpha: float, one_minus_alpha: float) -> str:
    """Write alpha as in `0.9987`, with up to 12 decimals so that it differs from 1."""
    decimals = 4
    while decimals < 12 and one_minus_alpha > 0 and one_minus_alpha < 10 ** (2 - decimals):
        decimals += 1
    return f"{alpha:.{decimals}f}"

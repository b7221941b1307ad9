"""Counts with their 95 % interval: how every accuracy in a report is stored and shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError
from ..storage.records import Receipt

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def wilson_interval(correct: int, total: int, *, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a share, as two fractions in [0, 1].

    Unlike `p ± z sqrt(p (1 - p) / n)` it stays inside [0, 1] and has a width also where nothing, or everything, is
    correct: a standard classifier's robust accuracy of 0 of 1000 reads as "at most 0.38 %", not as "exactly 0".

    Raises:
        InvalidInputError: unless `0 <= correct <= total` and `total > 0`.
    """
    if total <= 0 or not 0 <= correct <= total:
        raise InvalidInputError(f"{correct} of {total} is not a count; need 0 <= correct <= total and total > 0")
    share = correct / total
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

    @property
    def percent(self) -> float:
        """The share in percent."""
        return 100 * self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval in percent."""
        low, high = wilson_interval(self.correct, self.total)
        return 100 * low, 100 * high

    def to_json(self) -> dict[str, int | float]:
        """`correct`, `total`, `percent`, `low`, `high` (the last three in percent)."""
        low, high = self.interval
        return {
            "correct": self.correct,
            "total": self.total,
            "percent": self.percent,
            "low": low,
            "high": high,
        }


def outcome_counts(receipts: Sequence[Receipt]) -> tuple[Count, Count]:
    """Clean and robust, of all images of these partitions."""
    total = sum(receipt.n_images for receipt in receipts)
    clean = sum(receipt.clean_correct for receipt in receipts)
    return Count(clean, total), Count(sum(receipt.robust for receipt in receipts), total)

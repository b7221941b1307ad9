"""How fast a stage goes and what it will still take, from the times in its files' footers alone.

Nobody writes heartbeats: that a stage is running is known from its last finished piece, whose age is told as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.records import Receipt

WINDOW_SECONDS = 1800.0  # only pieces that were finished in it count for the speed


@dataclass(frozen=True)
class Pace:
    """Of one stage at one moment; None where the files cannot tell."""

    images_left: int
    images_per_second: float | None  # of all workers together, lately
    seconds_left: float | None
    last_finished: float | None  # seconds ago
    gpu_hours: float
    gpu_hours_left: float
    core_hours: float  # of workers without an accelerator
    core_hours_left: float

    def to_json(self) -> dict[str, Any]:
        """The fields under their names; `last_finished` as `last_finished_seconds_ago`."""
        content = dict(vars(self))
        return {**content, "last_finished_seconds_ago": content.pop("last_finished")}


def pace_of(receipts: Sequence[Receipt], n_images: int, now: float) -> Pace:
    """The pace of a stage of `n_images` at the time `now` (seconds since 1970)."""
    n_done = sum(receipt.n_images for receipt in receipts)
    gpu, core = _hours(receipts, accelerated=True), _hours(receipts, accelerated=False)
    each_left = (n_images - n_done) / n_done if n_done else 0.0
    speed, finished = _speed(receipts, now), max((receipt.finished for receipt in receipts), default=0.0)
    return Pace(
        images_left=n_images - n_done,
        images_per_second=speed,
        seconds_left=(n_images - n_done) / speed if speed else None,
        last_finished=max(0.0, now - finished) if finished else None,
        gpu_hours=gpu,
        gpu_hours_left=gpu * each_left,
        core_hours=core,
        core_hours_left=core * each_left,
    )


def _speed(receipts: Sequence[Receipt], now: float) -> float | None:
    """Images of the pieces finished lately, by the time since the first of those was begun."""
    lately = [receipt for receipt in receipts if receipt.finished > now - WINDOW_SECONDS]
    if not lately:
        return None
    begun = min(receipt.finished - receipt.seconds for receipt in lately)
    return sum(receipt.n_images for receipt in lately) / max(now - begun, 1e-9)


def _hours(receipts: Sequence[Receipt], *, accelerated: bool) -> float:
    held = (receipt for receipt in receipts if (receipt.device != "cpu") == accelerated)
    return sum(receipt.n_devices * receipt.seconds for receipt in held) / 3600

"""The rows of a report, and how `report/results.json` holds them.

A number that JSON cannot hold (NaN, infinity) is null.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from .counts import Count


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy table: `std`, `rob` or `mixed`, and the attack that `robust` was measured under."""

    classifier: str
    clean: Count
    robust: Count
    attack: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields without `classifier`, which is the key in the file."""
        return {"clean": self.clean, "robust": self.robust, "attack": self.attack}


@dataclass(frozen=True, kw_only=True)
class SurvivalStep(Count):
    """The images that are still correct after one step of the attack; the first step is `clean`."""

    step: str
    lost: int  # images that the step broke

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "step": self.step, "lost": self.lost}


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage; rows that another run computed count with the cost that they had in that run."""

    stage: str
    images: int
    partitions: int
    nodes: int
    devices: tuple[str, ...]  # names of accelerators, or "cpu"
    core_hours: float  # cores held x time, for workers without an accelerator
    gpu_hours: float  # accelerators, or shares of one, held x time
    wall_seconds: float | None  # duration in this run; None if this run computed none of the rows
    n_forward: int  # forward passes of images
    n_backward: int  # backward passes of images

    @property
    def images_per_second(self) -> float | None:
        """Return the images of the stage per wall-clock second, all workers together."""
        return self.images / self.wall_seconds if self.wall_seconds else None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "images_per_second": self.images_per_second}


def plain(value: Any) -> Any:
    """Return a value as JSON holds it; an object becomes the result of its `to_json` or its fields."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

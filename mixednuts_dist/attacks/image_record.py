"""The record of one image while it is attacked: numbers on the host, pixels on the image's device."""

from dataclasses import dataclass, field
from math import expm1, inf

from torch import Tensor

from .stepper import ImageSummary, Run

# Where in the plan a point was found: (place of the run, its iteration). Smaller ones come first.
Where = tuple[float, int]
AS_CLEAN: Where = (-2, 0)  # the clean image
AS_KNOWN: Where = (-1, 0)  # the adversarial example that was tried first
NEVER: Where = (inf, 0)  # for a robust image


@dataclass(eq=False)
class ImageRecord:
    """One image on its way through the plan."""

    x: Tensor  # (C, H, W) clean image
    label: int
    sample_id: int
    targets: list[int]  # classes to aim at, the likeliest first
    ranks: list[int]  # ranks of these classes on the clean image, 2 = runner-up
    clean_log1m_margin: float
    best: Tensor  # (C, H, W) where the smallest margin was verified
    log1m_margin: float  # log(1 - margin) at `best`: the larger, the smaller the margin
    best_at: Where = AS_CLEAN
    broken_at: Where = NEVER  # the first point in the order of the plan that was verified to be misclassified
    decided: bool = False
    group: int = -1  # the current one of the plan's groups
    open: set[int] = field(default_factory=set)  # places of the runs of this group that are not over
    log1m_margin_before: float = -inf  # as this group began
    n_forward: int = 1  # before any run: the clean image
    n_passes: dict[int, int] = field(default_factory=dict)  # place of a run -> passes of the steps that count
    n_verified: dict[int, int] = field(default_factory=dict)  # place of a run -> its verified points that count
    reached: dict[int, float] = field(default_factory=dict)  # place of a run -> its largest verified log1m_margin

    @property
    def broken(self) -> bool:
        """Whether a point was verified to be misclassified."""
        return self.broken_at < NEVER

    def summary(self, repeated: int | None) -> ImageSummary:
        """Return what decides whether the image takes a run, which may repeat the run at place `repeated`."""
        margin = -expm1(self.log1m_margin)
        repeated_margin = margin if repeated is None else -expm1(self.reached.get(repeated, self.log1m_margin))
        gain = expm1(self.log1m_margin) - expm1(self.log1m_margin_before)
        return ImageSummary(margin, -expm1(self.clean_log1m_margin), gain, repeated_margin)

    def offer(self, x: Tensor, log1m_margin: float, wrong: bool, where: Where, stop_when_broken: bool) -> None:
        """Add a verified point.

        The outcome does not depend on the order in which points come: the first misclassified one in the order of the
        plan counts with `stop_when_broken`, otherwise the one with the smallest margin, and of equal ones the first.
        """
        breaks = wrong and where < self.broken_at
        if stop_when_broken and (wrong or self.broken):
            better = breaks
        else:
            # With equal margins a misclassified point counts, and otherwise the first one.
            better = (log1m_margin, wrong, self.best_at) > (self.log1m_margin, self.broken, where)
        if breaks:
            self.broken_at = where
        if better:
            self.best, self.log1m_margin, self.best_at = x, log1m_margin, where

    def passes(self, plan: list[Run], stop_when_broken: bool) -> tuple[int, int]:
        """Return the (forward, backward) passes so far.

        For an image that leaves as soon as it is broken they end with the point that breaks it. Later runs only filled
        free slots; one after the other they would not have begun.
        """
        last = self.broken_at[0] if stop_when_broken else inf
        steps = {place: n for place, n in self.n_passes.items() if place <= last}
        n_forward = self.n_forward + sum(steps.values())
        n_forward += sum(n for place, n in self.n_verified.items() if place <= last)
        return n_forward, sum(plan[place].stepper.n_backward(n) for place, n in steps.items())

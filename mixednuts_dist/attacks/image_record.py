"""The record of one image while it is attacked: numbers on the host, pixels on the image's device."""

from dataclasses import dataclass, field
from math import expm1, inf

from torch import Tensor

from .stepper import ImageSummary, Run

# Where a point was found: (place of the run in the plan, number of passes of the run). Smaller ones come first.
Where = tuple[float, int]
AS_CLEAN: Where = (-2, 0)
AS_KNOWN: Where = (-1, 0)  # the adversarial example of the warm start
NEVER: Where = (inf, 0)


@dataclass(eq=False)
class Job:
    """One run on one image."""

    image: "ImageRecord"
    place: int  # place of the run in the plan
    run: Run
    n_passes: int = 0  # passes of its steps that the host knows of; after a misclassified point, those up to it
    queued_at: int = 0  # number of passes at its last point in the verification queue
    n_verified: int = 0  # number of its verified points
    reached: float = -inf  # the largest log1m_margin among its verified points

    @property
    def is_open(self) -> bool:
        """Whether the image still waits for its result."""
        return self in self.image.open

    @property
    def target(self) -> int:
        """The class to aim at; the label if the run has no target."""
        return self.image.targets[self.run.target - 1] if self.run.target else self.image.label

    @property
    def name(self) -> str:
        """The run's name, with the target's rank on the clean image."""
        return self.run.name.format(rank=self.image.ranks[self.run.target - 1]) if self.run.target else self.run.name


@dataclass(eq=False)
class QueuedPoint:
    """A point in the verification queue."""

    job: Job
    x: Tensor  # (C, H, W)
    n_passes: int  # passes of the run up to this point; for its best point those of the whole run
    ends: bool  # the run is over, and this is its best point


@dataclass(eq=False)
class ImageRecord:
    """The state of one image, from its admission until it is decided."""

    x: Tensor  # (C, H, W) clean image
    label: int
    sample_id: int
    targets: list[int]  # classes to aim at, the likeliest first
    ranks: list[int]  # ranks of these classes on the clean image, 2 = runner-up
    clean_log1m_margin: float
    stop_when_broken: bool
    best: Tensor = field(init=False)  # (C, H, W) the point for the result: see `offer`
    log1m_margin: float = field(init=False)  # log(1 - margin) at `best`: the larger, the smaller the margin
    best_at: Where = AS_CLEAN
    broken_at: Where = NEVER  # the first point in the order of the plan that was verified to be misclassified
    broken_by: str = ""  # what found this point: the name of an attack, "clean" or "warm-start"
    decided: bool = False
    group: int = -1  # index of the current group of runs
    log1m_margin_before: float = -inf  # `log1m_margin` when this group began
    jobs: list[Job] = field(default_factory=list)  # all runs on it so far
    open: list[Job] = field(default_factory=list)  # those of the current group whose best point is not verified yet
    n_forward: int = 0  # verifications before any run

    def __post_init__(self) -> None:
        self.best, self.log1m_margin = self.x, self.clean_log1m_margin

    @property
    def broken(self) -> bool:
        """Whether a point was verified to be misclassified."""
        return self.broken_at < NEVER

    def summary(self, run: Run) -> ImageSummary:
        """Return the values by which `Run.wanted` decides whether the image takes a run."""
        repeated = [job.reached for job in self.jobs if job.run.begins_as(run)]
        gain = expm1(self.log1m_margin) - expm1(self.log1m_margin_before)
        margin, clean_margin = -expm1(self.log1m_margin), -expm1(self.clean_log1m_margin)
        return ImageSummary(margin, clean_margin, gain, -expm1(max(repeated, default=self.log1m_margin)))

    def offer(self, x: Tensor, log1m_margin: float, wrong: bool, where: Where, step: str) -> None:
        """Update the image with a verified point, which `step` found: an attack, "clean" or "warm-start".

        The outcome does not depend on the order of the calls. With `stop_when_broken`, the best point of a broken image
        is its first misclassified point in the order of the plan. Otherwise, it is the point with the smallest margin.
        """
        breaks = wrong and where < self.broken_at
        if self.stop_when_broken and (wrong or self.broken):
            better = breaks
        else:
            # If margins are equal, take a misclassified point, or else the first point in the order of the plan.
            better = (log1m_margin, wrong, self.best_at) > (self.log1m_margin, self.broken, where)
        if breaks:
            self.broken_at, self.broken_by = where, step
        if better:
            self.best, self.log1m_margin, self.best_at = x, log1m_margin, where

    def take_in(self, point: QueuedPoint, log1m_margin: float, wrong: bool) -> None:
        """Add a verified point of a run. With `stop_when_broken`, a misclassified point cancels this and later runs.

        Earlier runs continue, because a point that they find would come first in the order of the plan.
        """
        job, where = point.job, (point.job.place, point.n_passes)
        if self.stop_when_broken and where >= self.broken_at:
            return
        job.n_verified += 1
        job.reached = max(job.reached, log1m_margin)
        self.offer(point.x, log1m_margin, wrong, where, job.run.attack)
        if self.stop_when_broken and wrong:
            job.n_passes = point.n_passes
            self.open = [each for each in self.open if each.place < job.place]
        elif point.ends:
            self.open.remove(job)

    def passes(self) -> tuple[int, int]:
        """Return the (forward, backward) passes so far.

        With `stop_when_broken`, the passes of a broken image count up to the point that breaks it. Passes of later
        runs do not count: these runs only used free slots, and would not have begun if all runs came one by one.
        """
        last = self.broken_at[0] if self.stop_when_broken else inf
        counted = [job for job in self.jobs if job.place <= last]
        n_forward = self.n_forward + sum(job.n_passes + job.n_verified for job in counted)
        return n_forward, sum(job.run.stepper.n_backward(job.n_passes) for job in counted)

"""The record of one image while it is attacked: numbers on the host, pixels on the image's device."""

from dataclasses import dataclass, field
from math import expm1, inf

from torch import Tensor

from .stepper import ImageSummary, Run

# Where in the plan a point was found: (place of the run, its iteration). Smaller ones come first.
Where = tuple[float, int]
AS_CLEAN: Where = (-2, 0)
AS_KNOWN: Where = (-1, 0)  # the adversarial example that was tried first
NEVER: Where = (inf, 0)


@dataclass(eq=False)
class Job:
    """One run on one image."""

    image: "ImageRecord"
    place: int  # place of the run in the plan
    run: Run
    n_passes: int = 0  # passes of its steps that count, as the host last read them
    n_queued: int = 0  # the iteration of its last point in the verification queue
    n_verified: int = 0  # its verified points that count
    reached: float = -inf  # the largest verified log1m_margin

    @property
    def is_open(self) -> bool:
        """Whether it still counts for its image."""
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
    """One image on its way through the plan."""

    x: Tensor  # (C, H, W) clean image
    label: int
    sample_id: int
    targets: list[int]  # classes to aim at, the likeliest first
    ranks: list[int]  # ranks of these classes on the clean image, 2 = runner-up
    clean_log1m_margin: float
    stop_when_broken: bool
    best: Tensor = field(init=False)  # (C, H, W) where the smallest margin was verified
    log1m_margin: float = field(init=False)  # log(1 - margin) at `best`: the larger, the smaller the margin
    best_at: Where = AS_CLEAN
    broken_at: Where = NEVER  # the first point in the order of the plan that was verified to be misclassified
    broken_by: str = ""  # the step of the evaluation that found this point
    decided: bool = False
    group: int = -1  # the current one of the plan's groups
    log1m_margin_before: float = -inf  # as this group began
    jobs: list[Job] = field(default_factory=list)  # all runs that it took so far
    open: list[Job] = field(default_factory=list)  # those of the current group that are not over
    n_forward: int = 0  # before any run

    def __post_init__(self) -> None:
        self.best, self.log1m_margin = self.x, self.clean_log1m_margin

    @property
    def broken(self) -> bool:
        """Whether a point was verified to be misclassified."""
        return self.broken_at < NEVER

    def summary(self, run: Run) -> ImageSummary:
        """Return what decides whether the image takes a run."""
        repeated = [job.reached for job in self.jobs if job.run.begins_as(run)]
        gain = expm1(self.log1m_margin) - expm1(self.log1m_margin_before)
        margin, clean_margin = -expm1(self.log1m_margin), -expm1(self.clean_log1m_margin)
        return ImageSummary(margin, clean_margin, gain, -expm1(max(repeated, default=self.log1m_margin)))

    def offer(self, x: Tensor, log1m_margin: float, wrong: bool, where: Where, step: str) -> None:
        """Add a verified point of a step of the evaluation.

        The outcome does not depend on the order in which points come: the first misclassified one in the order of the
        plan counts with `stop_when_broken`, otherwise the one with the smallest margin, and of equal ones the first.
        """
        breaks = wrong and where < self.broken_at
        if self.stop_when_broken and (wrong or self.broken):
            better = breaks
        else:
            # With equal margins a misclassified point counts, and otherwise the first one.
            better = (log1m_margin, wrong, self.best_at) > (self.log1m_margin, self.broken, where)
        if breaks:
            self.broken_at, self.broken_by = where, step
        if better:
            self.best, self.log1m_margin, self.best_at = x, log1m_margin, where

    def take_in(self, point: QueuedPoint, log1m_margin: float, wrong: bool) -> None:
        """Add a verified point of a run. With `stop_when_broken` a misclassified one cancels the later runs.

        Earlier runs continue, because they may break the image earlier in the plan.
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

        For an image that leaves as soon as it is broken they end with the point that breaks it. Later runs only filled
        free slots; one after the other they would not have begun.
        """
        last = self.broken_at[0] if self.stop_when_broken else inf
        counted = [job for job in self.jobs if job.place <= last]
        n_forward = self.n_forward + sum(job.n_passes + job.n_verified for job in counted)
        return n_forward, sum(job.run.stepper.n_backward(job.n_passes) for job in counted)

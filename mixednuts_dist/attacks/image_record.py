"""The record of one image while it is attacked: numbers on the host, pixels on the image's device."""

from dataclasses import dataclass, field
from math import expm1, inf

from torch import Tensor

from ..norms.random import key_number
from .attack import ImageSummary, Run

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
    n_passes: int = 0  # passes that the host knows of; after a misclassified point, those up to it
    n_verified: int = 0  # number of its verified points
    reached: float = -inf  # the largest log1m_margin among its verified points
    is_open: bool = True  # whether the image still waits for its result

    @property
    def target(self) -> int:
        """The class to aim at; the label if the run has no target."""
        return self.image.targets[self.run.target - 1] if self.run.target else self.image.label

    @property
    def key(self) -> int:
        """The key of its random numbers, which depends on the target's rank on the clean image."""
        image, run = self.image, self.run
        name = f"{run.name}/{image.ranks[run.target - 1]}" if run.target else run.name
        return key_number(image.seed, name, run.restart, image.sample_id)


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

    stop_when_broken: bool
    seed: int
    x: Tensor  # (C, H, W) clean image
    label: int
    sample_id: int
    targets: list[int]  # classes to aim at, the likeliest first
    ranks: list[int]  # ranks of these classes on the clean image, 2 = runner-up
    clean_log1m_margin: float
    cost: int = field(kw_only=True)  # passes per verification
    best: Tensor = field(init=False)  # (C, H, W) the point for the result: see `offer`
    log1m_margin: float = field(init=False)  # log(1 - margin) at `best`: the larger, the smaller the margin
    best_at: Where = AS_CLEAN
    broken_at: Where = NEVER  # the first point in the order of the plan that was verified to be misclassified
    decided: bool = False
    block: int = -1  # index of the current block of runs
    jobs: list[Job] = field(default_factory=list)  # the runs of this block; empty if the image is decided
    log1m_margin_before: float = -inf  # `log1m_margin` when this block began
    reached: dict[tuple[str, int, int], float] = field(default_factory=dict)  # `Run.start` -> `Job.reached`
    n_forward: int = 0  # passes before this block, and verifications
    n_backward: int = 0

    def __post_init__(self) -> None:
        self.best, self.log1m_margin = self.x, self.clean_log1m_margin

    @property
    def broken(self) -> bool:
        """Whether a point was verified to be misclassified."""
        return self.broken_at < NEVER

    @property
    def next_job(self) -> Job | None:
        """The first run in the order of the plan whose best point is not verified yet."""
        return next((job for job in self.jobs if job.is_open), None)

    def summary(self, run: Run) -> ImageSummary:
        """Return the values by which `Run.wanted` decides whether the image takes a run."""
        repeated = self.reached.get(run.start, self.log1m_margin)
        gain = expm1(self.log1m_margin) - expm1(self.log1m_margin_before)
        return ImageSummary(-expm1(self.log1m_margin), -expm1(self.clean_log1m_margin), gain, -expm1(repeated))

    def offer(self, x: Tensor, log1m_margin: float, wrong: bool, where: Where) -> None:
        """Update the image with a verified point; the outcome does not depend on the order of the calls.

        With `stop_when_broken`, the best point of a broken image is its first misclassified point in the order of the
        plan. Otherwise, it is the point with the smallest margin.
        """
        breaks = wrong and where < self.broken_at
        if self.stop_when_broken and (wrong or self.broken):
            better = breaks
        else:
            # If margins are equal, take a misclassified point, or else the first point in the order of the plan.
            better = (log1m_margin, wrong, self.best_at) > (self.log1m_margin, self.broken, where)
        if breaks:
            self.broken_at = where
        if better:
            self.best, self.log1m_margin, self.best_at = x, log1m_margin, where

    def take_in(self, point: QueuedPoint, log1m_margin: float, wrong: bool) -> None:
        """Add a verified point of a run. With `stop_when_broken`, a misclassified point cancels this and later runs."""
        job, where = point.job, (point.job.place, point.n_passes)
        if self.stop_when_broken and where >= self.broken_at:
            return
        job.n_verified += 1
        job.reached = max(job.reached, log1m_margin)
        self.offer(point.x, log1m_margin, wrong, where)
        if self.stop_when_broken and wrong:
            job.n_passes = point.n_passes
            for later in self.jobs:
                later.is_open &= later.place < job.place
        elif point.ends:
            job.is_open = False

    def end_block(self) -> None:
        """Note the counts and the margins of the block of runs, and let go of the runs, which refer to the image."""
        self.n_forward, self.n_backward = self.passes()
        for job in self.jobs:
            self.reached[job.run.start] = max(job.reached, self.reached.get(job.run.start, -inf))
        self.jobs = []

    def passes(self) -> tuple[int, int]:
        """Return the (forward, backward) passes so far; with `stop_when_broken`, up to the point that breaks the image.

        Passes of later runs only used free slots.
        """
        last = self.broken_at[0] if self.stop_when_broken else inf
        counted = [job for job in self.jobs if job.place <= last]
        n_forward = self.n_forward + sum(job.n_passes + job.n_verified * self.cost for job in counted)
        return n_forward, self.n_backward + sum(job.run.stepper.n_backward(job.n_passes) for job in counted)

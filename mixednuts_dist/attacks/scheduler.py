"""Continuous batching of attack runs: every pass is full, and an image's result does not depend on the other images.

One image's way::

    Group (a partition)            x, label, sample id, perhaps a known adversarial example
      │  float32                   is the clean image classified correctly? the order of its targets
      ▼
    ImageRecord                    goes through the plan's groups of runs, for instance
      │                              [APGD-CE, APGD-T towards 9 classes] [FAB-T towards 9 classes] [Square]
      │  which runs it wants       `Run.wanted`, for instance of borderline images alone
      ▼
    Batch.waiting                  one queue per stepper and precision; runs of one group wait side by side
      │  a slot is free
      ▼
    Batch.step                     ask -> forward and backward pass -> tell, for all slots at once, in one batch shape
      │                            a misclassified point is copied with its iteration number; the slot continues
      ▼
    claims                         copied points, and the best point of each run that is over
      │  float32 verification      the only place that decides what is misclassified and what its margin is
      ▼
    ImageRecord.offer              the first misclassified point in the order of the plan breaks the image: this cancels
      │                            the later runs, and nothing else. When no run of the group is open, the next one
      ▼
    Finished (the group)           with the last image that is decided

So outcomes and counts depend on the image, its sample id, the seed and the batch shape, and not on partitions, order,
other images, or when the host looked. A new group enters as soon as no batch is full.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes
from ..config.threat import ThreatModel
from .attack import Setting
from .batch import Batch, Claim, Job
from .budget import WARM_START, AttackBudget
from .gradient_model import AttackedModel
from .image_record import AS_CLEAN, AS_KNOWN, NEVER, ImageRecord, Where
from .progress import Progress
from .stepper import Run, Stepper
from .verification import Verified, Verifier

CLEAN = "clean"
_BESIDES = {AS_CLEAN[0]: CLEAN, AS_KNOWN[0]: WARM_START, NEVER[0]: ""}
_STEP_COST = 3  # cost of a step of a run that should end, in rows of a verification
_APART_COST = 4  # cost of a row of a verification if float32 passes have a separate, small batch shape

_logger = logging.getLogger(__name__)

Planner = Callable[[Setting], Sequence[Run]]
Key = tuple[Stepper[Any], bool]  # runs with the same stepper and precision share a batch


@dataclass(frozen=True)
class Group:
    """Images that come and go together: a partition, or all images of a call."""

    x: Tensor  # (B, C, H, W) clean images
    y: Tensor  # (B,) labels
    sample_ids: Sequence[int]  # key the random numbers
    known: Tensor | None = None  # (B, C, H, W) points of an earlier stage inside the same balls, tried first
    key: Any = None  # the caller's


@dataclass(frozen=True)
class Finished:
    """The outcome of a group; (B,) each, on the host except for the images."""

    group: Group
    best: Tensor  # where the smallest margin was verified; a broken image is misclassified there
    log1m_margin: Tensor  # float64, log(1 - margin) there
    broken: Tensor  # bool
    broken_by: list[str]  # the attack that broke it, "clean", "warm-start", or "" for a robust image
    n_forward: int  # passes of real images; padding is not counted
    n_backward: int
    decided: Tensor  # bool: False for images whose attack was interrupted


@dataclass
class Scheduler:
    """Runs a plan on groups of images.

    Args:
        attacked: what is attacked and verified.
        planner: makes the plan, once the number of classes is known.
        stop_when_broken: an image leaves as soon as a misclassified point is verified; otherwise it ends its plan.
        progress: called with a `Progress` whenever points were verified.
    """

    attacked: AttackedModel
    planner: Planner
    threat: ThreatModel
    budget: AttackBudget
    seed: int
    shape: BatchShape
    stop_when_broken: bool = True
    progress: Callable[[Progress], None] | None = None
    plan: list[Run] = field(init=False, default_factory=list)  # made with the first group

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.attacked.model, self.shape)
        fast, float32 = self.attacked.fast, self.attacked.float32
        self._passes = {False: Passes(self.shape, fast.probe, fixed=fast.compiled)}
        self._passes[True] = self._passes[False] if float32 is None else Passes(self.shape.float32, float32.probe)
        self._batches: dict[Key, Batch] = {}  # in the order in which their steps are due
        self._groups_of_runs: list[range] = []  # places in the plan
        self._repeats: list[int | None] = []  # per run, the place of the low-precision run that it repeats in float32
        self._claims: list[Claim] = []  # the verification queue
        self._cost_of_waiting = 0  # cost of the waiting claims, in rows of a verification
        self._present: list[tuple[Group, list[ImageRecord]]] = []
        self._like = torch.zeros(0)  # images of the first group, to try smaller batch shapes with
        self.n_decided = 0  # images of all groups so far
        self._n_images = self._n_broken = self._n_forward = self._n_backward = 0

    def run(self, source: Iterable[Group | None]) -> Iterator[Finished]:
        """Yield each group as its last image is decided.

        The next group is taken from the source whenever no batch is full. The source may give None, "nothing yet": the
        scheduler continues with its images, and asks again after the next pass; a source that will have nothing for a
        while waits a little before it gives None. After its end the scheduler finishes its images.

        Raises:
            torch.OutOfMemoryError: if not even one image fits.
        """
        groups, is_open = iter(source), True
        while is_open or self._present:
            while is_open and not any(batch.is_full for batch in self._batches.values()):
                group = next(groups, _END)
                if isinstance(group, _End):
                    is_open = False
                elif group is None:
                    break
                else:
                    self._admit(group)
                    yield from self._finished()
            self.step()
            yield from self._finished()

    def run_one(self, group: Group) -> Finished:
        """Return the outcome of one group; a keyboard interrupt returns what is verified by then."""
        try:
            return next(self.run([group]))
        except KeyboardInterrupt:
            if not self._present:  # not even the clean images were verified
                raise
            _logger.warning("interrupted: returning what is verified so far; `decided` marks the images that are done")
            for batch in self._batches.values():
                batch.note_passes()
            return self._outcome(*self._present[0])

    def step(self) -> None:
        """Take one step of a batch, or verify the claims if that is due."""
        # Prefer the latest full batch, so that images do not pile up in front of it. If none is full, step the earliest
        # one: stragglers then catch up and share later passes.
        busy = [batch for batch in self._batches.values() if batch.n_ready]
        full = [batch for batch in busy if batch.is_full]
        if self._claims and (not busy or self._is_due()):
            self._verify()
        elif busy:
            self._claims += (full[-1] if full else busy[0]).step()
            self._cost_of_waiting += _STEP_COST * len(self._claims)

    def _is_due(self) -> bool:
        """Whether the claims fill a pass, or have waited so long that a pass for them costs no more."""
        if len(self._claims) >= self.verifier.passes.shape.rows:
            return True
        rows = self.verifier.passes.rows_for(len(self._claims), self._like[: len(self._claims)])
        return self._cost_of_waiting >= rows * (_APART_COST if self.shape.float32 is not self.shape else 1)

    def _verify(self) -> None:
        """Verify all claims, cancel the runs that no longer count, and send images on."""
        claims, self._claims, self._cost_of_waiting = [each for each in self._claims if each.job.is_open], [], 0
        if not claims:
            return
        images = [claim.job.image for claim in claims]
        verdicts = self.verifier.verify(torch.stack([claim.x for claim in claims]), _labels(images))
        found = zip(claims, verdicts.log1m_margin.tolist(), verdicts.wrong.tolist(), strict=True)
        for claim, log1m_margin, wrong in found:
            self._take_in(claim, log1m_margin, wrong)
        broken = [image for image in dict.fromkeys(images) if image.broken and self.stop_when_broken]
        if broken:
            self._cancel(broken)
        for image in dict.fromkeys(images):
            if not image.open and not image.decided:
                self._batch_of(image).n_images -= 1
                self._advance(image)
        if self.progress is not None:
            self.progress(self._progress())

    def _take_in(self, claim: Claim, log1m_margin: float, wrong: bool) -> None:
        image, place = claim.job.image, claim.job.place
        where: Where = (place, claim.n_passes)
        if self.stop_when_broken and where >= image.broken_at:
            return
        image.n_verified[place] = image.n_verified.get(place, 0) + 1
        image.reached[place] = max(image.reached.get(place, -torch.inf), log1m_margin)
        image.offer(claim.x, log1m_margin, wrong, where, self.stop_when_broken)
        if image.broken_at == where and self.stop_when_broken:
            image.n_passes[place] = claim.n_passes
        if claim.ends:
            image.open.discard(place)

    def _cancel(self, broken: list[ImageRecord]) -> None:
        """Cancel the runs after the point that breaks an image; earlier runs may still break it earlier in the plan."""
        for image in broken:
            last = image.broken_at[0]
            image.open = {place for place in image.open if place < last}
        for batch in {self._batch_of(image) for image in broken}:
            batch.drop_cancelled()

    # Images come, go from group to group of runs, and leave

    def _admit(self, group: Group) -> None:
        clean = self.verifier.verify(group.x, group.y)
        known = None if group.known is None else self.verifier.verify(group.known, group.y)
        n_classes = clean.logits.shape[1]
        if not self._n_images:
            self._like = group.x
            self._make_plan(n_classes)
        targets, ranks = ordered_targets(clean.logits, self.budget.n_targets(n_classes), known)
        each = zip(
            group.x, group.y.tolist(), group.sample_ids, targets.tolist(), ranks.tolist(), clean.log1m_margin.tolist(),
            clean.wrong.tolist(), strict=True,
        )  # fmt: skip
        images = [
            ImageRecord(
                x, label, sample_id, aims, order, log1m_margin, x, log1m_margin, broken_at=AS_CLEAN if wrong else NEVER
            )
            for x, label, sample_id, aims, order, log1m_margin, wrong in each
        ]  # fmt: skip
        if known is not None and group.known is not None:
            points = zip(images, group.known, known.log1m_margin.tolist(), known.wrong.tolist(), strict=True)
            for image, x, log1m_margin, wrong in points:
                image.n_forward += 1
                image.offer(x, log1m_margin, wrong, AS_KNOWN, self.stop_when_broken)
        self._present.append((group, images))
        self._n_images += len(images)
        for image in images:
            self._advance(image)

    def _make_plan(self, n_classes: int) -> None:
        low_precision = self.attacked.float32 is not None
        subject = self.attacked.subject or self.attacked.model
        self.plan = list(self.planner(Setting(self.threat, self.budget, n_classes, self.seed, subject, low_precision)))
        places = range(len(self.plan))
        self._repeats = [_repeated(self.plan, at) for at in places]
        together = groupby(places, key=lambda at: (_key(self.plan[at]), self.plan[at].group or at))
        self._groups_of_runs = [range(min(group), max(group) + 1) for group in (list(each) for _, each in together)]
        # Float32 passes with their own batch shape come last: they wait until they are full or nothing else is left.
        apart = self.shape.float32 is not self.shape
        for key in sorted(dict.fromkeys(map(_key, self.plan)), key=lambda key: apart and key[1]):
            stepper, float32 = key
            model = self.attacked.in_float32 if float32 else self.attacked.fast
            self._batches[key] = Batch(stepper, model, self._passes[float32], self._like, claims=self.stop_when_broken)

    def _advance(self, image: ImageRecord) -> None:
        """Send an image to the next group of runs of which it wants one; without any it is decided."""
        while not (image.broken and self.stop_when_broken) and image.group + 1 < len(self._groups_of_runs):
            image.group += 1
            places = [at for at in self._groups_of_runs[image.group] if self._is_wanted(image, at)]
            if places:
                image.log1m_margin_before, image.open = image.log1m_margin, set(places)
                batch = self._batch_of(image)
                batch.n_images += 1
                batch.waiting += [Job(image, at, self.plan[at]) for at in places]
                return
        image.decided = True
        self.n_decided += 1
        self._n_broken += image.broken

    def _is_wanted(self, image: ImageRecord, at: int) -> bool:
        wanted = self.plan[at].wanted
        return wanted is None or wanted(image.summary(self._repeats[at]))

    def _batch_of(self, image: ImageRecord) -> Batch:
        return self._batches[_key(self.plan[self._groups_of_runs[image.group][0]])]

    def _finished(self) -> Iterator[Finished]:
        for group, images in list(self._present):
            if all(image.decided for image in images):
                self._present = [each for each in self._present if each[1] is not images]
                outcome = self._outcome(group, images)
                self._n_forward += outcome.n_forward
                self._n_backward += outcome.n_backward
                yield outcome

    def _outcome(self, group: Group, images: list[ImageRecord]) -> Finished:
        places = [image.broken_at[0] for image in images]
        passes = [self._n_passes(image) for image in images]
        return Finished(
            group=group,
            best=torch.stack([image.best for image in images]),
            log1m_margin=torch.tensor([image.log1m_margin for image in images], dtype=torch.float64),
            broken=torch.tensor([image.broken for image in images]),
            broken_by=[_BESIDES[at] if at in _BESIDES else self.plan[int(at)].attack for at in places],
            n_forward=sum(n for n, _ in passes),
            n_backward=sum(n for _, n in passes),
            decided=torch.tensor([image.decided for image in images]),
        )

    # Counts

    def _n_passes(self, image: ImageRecord) -> tuple[int, int]:
        return image.passes(self.plan, self.stop_when_broken)

    def _in_flight(self) -> tuple[int, int]:
        for batch in self._batches.values():
            batch.note_passes()
        each = [self._n_passes(image) for _, images in self._present for image in images]
        return sum(n for n, _ in each), sum(n for _, n in each)

    @property
    def n_forward_in_flight(self) -> int:
        """Forward passes so far of images whose groups are not finished."""
        return self._in_flight()[0]

    @property
    def n_rows(self) -> int:
        """Rows of all attack passes so far, including padding and runs that no longer counted."""
        return sum(batch.n_rows for batch in self._batches.values())

    def _progress(self) -> Progress:
        n_forward, n_backward = self._in_flight()
        return Progress(
            self._n_images, self.n_decided, self._n_broken, self._n_forward + n_forward, self._n_backward + n_backward
        )


class _End:
    """Comes after the last group."""


_END = _End()


def _key(run: Run) -> Key:
    return run.stepper, run.float32


def _labels(images: Sequence[ImageRecord]) -> Tensor:
    return torch.tensor([image.label for image in images])


def _repeated(plan: Sequence[Run], at: int) -> int | None:
    """Return the place of the low-precision run that the one at `at` repeats in float32; None if there is none."""

    def identity(run: Run) -> tuple[str, int, int]:
        return run.name, run.target, run.restart

    if not plan[at].float32:
        return None
    return next((i for i in range(at) if not plan[i].float32 and identity(plan[i]) == identity(plan[at])), None)


def ordered_targets(clean_BK: Tensor, n_targets: int, known: Verified | None) -> tuple[Tensor, Tensor]:
    """Return each image's targets, (B, T), and their ranks on the clean image (2 = runner-up).

    The targets are the classes of the clean logits' ranks 2 .. T + 1, as published. They are taken in that order or, if
    a point of an earlier stage is known, by its logits: the nearest class there is the likeliest to succeed.
    """
    by_rank = clean_BK.sort(dim=1, descending=False).indices.flip(1)[:, 1 : n_targets + 1]
    ranks = torch.arange(2, n_targets + 2).expand_as(by_rank)
    if known is None:
        return by_rank, ranks
    order = known.logits.gather(1, by_rank).sort(dim=1, descending=True, stable=True).indices
    return by_rank.gather(1, order), ranks.gather(1, order)

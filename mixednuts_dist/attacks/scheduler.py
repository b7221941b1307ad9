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
    verification queue             copied points, and the best point of each run that is over
      │  float32 verification      the only place that decides what is misclassified and what its margin is
      ▼
    ImageRecord.offer              the first misclassified point in the order of the plan breaks the image: this cancels
      │                            the later runs, and nothing else. When no run of the group is open, the next one
      ▼
    AttackResult (of the group)    with the last image that is decided; its images are verified once more

So outcomes and counts depend on the image, its sample id, the seed and the batch shape, and not on partitions, order,
other images, or when the host looked.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes
from ..config.threat import ThreatModel
from .attack import Setting
from .batch import Batch, Job, QueuedPoint
from .budget import WARM_START, AttackBudget
from .draws import N_VERIFICATION, misclassified_share
from .gradient_model import AttackedModel
from .image_record import AS_CLEAN, AS_KNOWN, NEVER, ImageRecord, Where
from .progress import Progress
from .result import AttackResult
from .stepper import Run, Stepper
from .verification import Verified, Verifier

CLEAN = "clean"
_BESIDES = {AS_CLEAN[0]: CLEAN, AS_KNOWN[0]: WARM_START, NEVER[0]: ""}
_STEP_COST = 3  # cost of a step of a run that should end, in rows of a verification
_APART_COST = 4  # cost of a row of a verification if float32 passes have a separate, small batch shape

_logger = logging.getLogger(__name__)

partial_results = ContextVar("partial_results", default=True)  # whether a keyboard interrupt returns what is verified

Planner = Callable[[Setting, Sequence[str]], Sequence[Run]]  # plans the attacks of these names
Key = tuple[Stepper[Any], bool]  # runs with the same stepper and precision share a batch


@dataclass(frozen=True)
class Group:
    """Images that come and go together: a partition, or all images of a call."""

    x: Tensor  # (B, C, H, W) clean images
    y: Tensor  # (B,) labels
    sample_ids: Sequence[int]  # key the random numbers
    known: Tensor | None = None  # (B, C, H, W) points of an earlier stage inside the same balls, tried first


@dataclass
class Scheduler:
    """Runs a plan on groups of images.

    Args:
        attacked: what is attacked and verified.
        planner: makes the plan of the attacks, once the number of classes is known.
        stop_when_broken: an image leaves as soon as a misclassified point is verified; otherwise it ends its plan.
        progress: called with a `Progress` whenever points were verified.
    """

    attacked: AttackedModel
    planner: Planner
    attacks: Sequence[str]
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
        self._queue: list[QueuedPoint] = []  # to be verified
        self._cost_of_waiting = 0  # cost of the waiting points, in rows of a verification
        self._present: list[tuple[Group, list[ImageRecord]]] = []
        self._like = torch.zeros(0)  # images of the first group, to try smaller batch shapes with
        self._n_decided = 0  # images of all groups so far
        self._n_images = self._n_broken = self._n_forward = self._n_backward = 0

    def run_one(self, group: Group) -> AttackResult:
        """Return the result of one group; a keyboard interrupt returns what is verified by then, except in a worker.

        Raises:
            torch.OutOfMemoryError: if not even one image fits.
        """
        try:
            self.admit(group)
            while True:
                for _, result in self.finished():
                    return result
                self.step()
        except KeyboardInterrupt:
            if not self._present or not partial_results.get():  # not even the clean images were verified
                raise
            _logger.warning("interrupted: returning what is verified so far; `decided` marks the images that are done")
            for batch in self._batches.values():
                batch.note_passes()
            return self._result(*self._present[0])

    @property
    def has_room(self) -> bool:
        """Whether no batch is full, so that a further group may enter."""
        return not any(batch.is_full for batch in self._batches.values())

    def step(self) -> None:
        """Take one step of a batch, or verify the queued points if that is due."""
        # Prefer the latest full batch, so that images do not pile up in front of it. If none is full, step the earliest
        # one: stragglers then catch up and share later passes.
        busy = [batch for batch in self._batches.values() if batch.n_ready]
        full = [batch for batch in busy if batch.is_full]
        if self._queue and (not busy or self._is_due()):
            self._verify()
        elif busy:
            self._queue += (full[-1] if full else busy[0]).step()
            self._cost_of_waiting += _STEP_COST * len(self._queue)

    def _is_due(self) -> bool:
        """Whether the queued points fill a pass, or have waited so long that a pass for them costs no more."""
        if len(self._queue) >= self.verifier.passes.shape.rows:
            return True
        rows = self.verifier.passes.rows_for(len(self._queue), self._like[: len(self._queue)])
        return self._cost_of_waiting >= rows * (_APART_COST if self.shape.float32 is not self.shape else 1)

    def _verify(self) -> None:
        """Verify all queued points, cancel the runs that no longer count, and send images on."""
        points, self._queue, self._cost_of_waiting = [each for each in self._queue if each.job.is_open], [], 0
        if not points:
            return
        images = [point.job.image for point in points]
        labels = torch.tensor([image.label for image in images])
        verified = self.verifier.verify(torch.stack([point.x for point in points]), labels)
        for each in zip(points, verified.log1m_margin.tolist(), verified.wrong.tolist(), strict=True):
            self._take_in(*each)
        broken = [image for image in dict.fromkeys(images) if image.broken and self.stop_when_broken]
        if broken:
            self._cancel(broken)
        for image in dict.fromkeys(images):
            if not image.open and not image.decided:
                self._batch_of(image).n_images -= 1
                self._advance(image)
        if self.progress is not None:
            n_forward, n_backward = self.passes_in_flight()
            passes = self._n_forward + n_forward, self._n_backward + n_backward
            self.progress(Progress(self._n_images, self._n_decided, self._n_broken, *passes))

    def _take_in(self, point: QueuedPoint, log1m_margin: float, wrong: bool) -> None:
        image, place = point.job.image, point.job.place
        where: Where = (place, point.n_passes)
        if self.stop_when_broken and where >= image.broken_at:
            return
        image.n_verified[place] = image.n_verified.get(place, 0) + 1
        image.reached[place] = max(image.reached.get(place, -torch.inf), log1m_margin)
        image.offer(point.x, log1m_margin, wrong, where, self.stop_when_broken)
        if image.broken_at == where and self.stop_when_broken:
            image.n_passes[place] = point.n_passes
        if point.ends:
            image.open.discard(place)

    def _cancel(self, broken: list[ImageRecord]) -> None:
        """Cancel the runs after the point that breaks an image; earlier runs may still break it earlier in the plan."""
        for image in broken:
            last = image.broken_at[0]
            image.open = {place for place in image.open if place < last}
        for batch in {self._batch_of(image) for image in broken}:
            batch.drop_cancelled()

    # Images come, go from group to group of runs, and leave

    def admit(self, group: Group) -> None:
        """Verify the clean images of a group, and send them on."""
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
        subject = self.attacked.model if self.attacked.draws is None else self.attacked.draws.model
        setting = Setting(self.threat, self.budget, n_classes, self.seed, subject, low_precision)
        self.plan = list(self.planner(setting, self.attacks))
        places = range(len(self.plan))
        self._repeats = [_repeated(self.plan, at) for at in places]
        together = groupby(places, key=lambda at: (_key(self.plan[at]), self.plan[at].group or at))
        self._groups_of_runs = [range(min(group), max(group) + 1) for group in (list(each) for _, each in together)]
        # Float32 passes with their own batch shape come last: they wait until they are full or nothing else is left.
        apart = self.shape.float32 is not self.shape
        for key in sorted(dict.fromkeys(map(_key, self.plan)), key=lambda key: apart and key[1]):
            stepper, float32 = key
            model = (self.attacked.float32 if float32 else None) or self.attacked.fast
            self._batches[key] = Batch(
                stepper, model, self._passes[float32], self._like, stop_when_broken=self.stop_when_broken
            )

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
        self._n_decided += 1
        self._n_broken += image.broken

    def _is_wanted(self, image: ImageRecord, at: int) -> bool:
        wanted = self.plan[at].wanted
        return wanted is None or wanted(image.summary(self._repeats[at]))

    def _batch_of(self, image: ImageRecord) -> Batch:
        return self._batches[_key(self.plan[self._groups_of_runs[image.group][0]])]

    def finished(self) -> Iterator[tuple[Group, AttackResult]]:
        """Yield the groups whose images are all decided; each one once."""
        for group, images in list(self._present):
            if all(image.decided for image in images):
                self._present = [each for each in self._present if each[1] is not images]
                n_forward, n_backward = self._passes_of(images)
                self._n_forward += n_forward
                self._n_backward += n_backward
                yield group, self._result(group, images)

    def _result(self, group: Group, images: list[ImageRecord]) -> AttackResult:
        """Verify the best points once more; an image that is correct there counts as robust.

        Fresh draws decide about a random classifier.
        """
        best, draws = torch.stack([image.best for image in images]), self.attacked.draws
        verified = self.verifier.verify(best, group.y)
        broken, n_draws, n_verified = verified.wrong, 1, len(images)
        if draws is not None:
            broken = misclassified_share(draws, best, group.y, rows=self.shape.rows).cpu() >= 0.5
            n_draws, n_verified = draws.n, n_verified * (1 + math.ceil(N_VERIFICATION / draws.n))
        places = [image.broken_at[0] for image in images]
        broken_by = [_BESIDES[at] if at in _BESIDES else self.plan[int(at)].attack for at in places]
        survived, before = {}, {CLEAN}
        for attack in [WARM_START] * (group.known is not None) + list(self.attacks):
            before.add(attack)
            survived[attack] = ~torch.tensor([name in before for name in broken_by]) | ~broken
        if draws is not None and survived:
            survived[attack] = ~broken  # the draws verify the images after the last attack
        device, (n_forward, n_backward) = best.device, self._passes_of(images)
        return AttackResult(
            clean=(torch.tensor([name != CLEAN for name in broken_by]) | ~broken).to(device),
            broken=broken.to(device),
            survived={attack: left.to(device) for attack, left in survived.items()},
            x_adv=best,
            logits=verified.logits.to(device),
            log_one_minus_margin=verified.log1m_margin.to(device),
            n_forward=(n_forward + n_verified) * n_draws,
            n_backward=n_backward * n_draws,
            unconfirmed=(torch.tensor([image.broken for image in images]) & ~broken).to(device),
            decided=torch.tensor([image.decided for image in images]).to(device),
        )

    # Counts

    def _passes_of(self, images: Sequence[ImageRecord]) -> tuple[int, int]:
        each = [image.passes(self.plan, self.stop_when_broken) for image in images]
        return sum(n for n, _ in each), sum(n for _, n in each)

    def passes_in_flight(self) -> tuple[int, int]:
        """Return the (forward, backward) passes so far of images whose groups are not finished."""
        for batch in self._batches.values():
            batch.note_passes()
        return self._passes_of([image for _, images in self._present for image in images])

    @property
    def n_rows(self) -> int:
        """Rows of all attack passes so far, including padding and runs that no longer counted."""
        return sum(batch.n_rows for batch in self._batches.values())


def _key(run: Run) -> Key:
    return run.stepper, run.float32


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

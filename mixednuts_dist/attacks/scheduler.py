"""Continuous batching: a run that ends leaves its slot to the next one, and no result depends on the other images.

The diagram follows one image::

    Group (a partition)     x, label, sample id, perhaps a known adversarial example
      ▼
    Scheduler.admit         float32: is the clean image classified correctly? which targets are the likeliest?
      ▼
    ImageRecord             goes through the plan's blocks of runs, and takes those runs that want it (`Run.wanted`):
      │                     [APGD-CE, APGD-T towards 9 classes] [FAB-T towards 9 classes] [Square]
      ▼
    Batch.waiting           one queue per stepper and precision; the runs of a block wait side by side
      ▼
    Batch.step              ask -> forward and backward pass -> tell, for all slots at once, in one batch shape; a
      │                     misclassified point is copied with its pass number, and the slot continues
      ▼
    Scheduler._verify       float32 verification of these copies, and of the best point of each run that is over
      ▼
    ImageRecord.take_in     the first misclassified point in the order of the plan breaks the image and cancels later
      │                     runs; when all runs of a block are over, the image goes on to the next block
      ▼
    AttackResult            when all images of the Group are decided; their best points are verified once more

So outcomes and counts depend on the image, its sample id, the seed and the batch shape, and not on partitions, order,
other images, or when the host reads from the device.
"""

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, PassSizes
from ..acceleration.precision import FastCopies
from ..config.threat import ThreatModel
from ..errors import InvalidInputError
from ..norms.ball import ULP, ball_of
from .attack import Run, Setting
from .batch import Batch
from .budget import WARM_START, AttackBudget
from .draws import Draws, DrawsVerifier
from .gradient_model import AttackedModel, AttackMode, GradientModel
from .image_record import AS_CLEAN, AS_KNOWN, ImageRecord, Job, QueuedPoint
from .plans import Planner, ensemble_plan
from .result import AttackResult, Progress
from .verification import Verified, Verifier

CLEAN = "clean"
_STEP_COST = 3  # cost of a step that a run takes while its point waits, in rows of a verification pass
_TOO_FAR = 1.01  # a longer perturbation, in radii, is a mistake of the attack and not rounding
_APART_COST = 4  # cost of a row of a verification if float32 passes have a separate, small batch shape

_logger = logging.getLogger(__name__)

partial_results = ContextVar("partial_results", default=True)  # whether a keyboard interrupt returns what is verified


@dataclass(frozen=True)
class Group:
    """Images that enter together and share one `AttackResult`: a partition, or all images of a call."""

    x: Tensor  # (B, C, H, W) clean images
    y: Tensor  # (B,) labels
    sample_ids: Sequence[int]  # key the random numbers
    known: Tensor | None = None  # (B, C, H, W) points of an earlier stage, tried first; not checked against the balls


class Scheduler:
    """Runs attacks on groups of images; arguments that are not listed are those of `autoattack`.

    Args:
        model: a classifier, or an `AttackedModel` with its own passes.
        like_BCHW: images with which fast copies and smaller batch shapes are tried.
        planner: plans the runs of the attacks, once the number of classes is known.
        stop_when_broken: a verified misclassified point cancels the later runs on its image; otherwise, each image
            takes all runs of the plan, and only the best point of each run is verified.
    """

    def __init__(
        self, model: Callable[[Tensor], Tensor] | AttackedModel, like_BCHW: Tensor, *, threat: ThreatModel,
        attacks: Sequence[str], budget: AttackBudget, shape: BatchShape, planner: Planner = ensemble_plan,
        seed: int = 0, mode: AttackMode = "transfer", copies: FastCopies | None = None, eot: int | None = None,
        stop_when_broken: bool = True, progress: Callable[[Progress], None] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(model, AttackedModel):
            self.attacked = model
        elif eot is None:
            self.attacked = AttackedModel.of(model, copies=copies, like_BCHW=like_BCHW, rows=shape.rows, mode=mode)
        else:
            draws, shape = Draws(model, eot, seed, mode), BatchShape(max(1, shape.rows // eot), fixed=True)
            self.attacked = AttackedModel(model, GradientModel(draws.climb))
        self.verifier = DrawsVerifier(draws, shape) if eot else Verifier(self.attacked.model, shape)
        self._n_draws = eot or 1  # rows of an image in each pass
        self.attacks, self.shape, self._threat, self._budget, self._planner = attacks, shape, threat, budget, planner
        self._like, self._seed, self._stop_when_broken, self._progress = like_BCHW, seed, stop_when_broken, progress
        self._batches: list[Batch] = []  # in the order of the plan; separate float32 shapes come last
        # The plan, in blocks of runs: (batch, runs with their places in the plan). Made by the first `admit`.
        self._blocks: list[tuple[Batch, list[tuple[int, Run]]]] = []
        self._step_at: dict[float, str] = {AS_CLEAN[0]: CLEAN, AS_KNOWN[0]: WARM_START}  # place -> attack
        self._queue: list[QueuedPoint] = []  # to be verified
        self._cost_of_waiting = 0  # cost of the waiting points, in rows of a verification
        self._inside: dict[Any, tuple[Group, list[ImageRecord]]] = {}  # groups that are not finished, by key
        self._done: dict[Any, AttackResult] = {}  # results of prefetched groups

    def run_one(self, group: Group) -> AttackResult:
        """Return the result of one group; a keyboard interrupt returns what is verified by then, except in a worker.

        Raises:
            torch.OutOfMemoryError: if not even one image fits.
        """
        try:
            return self.finish(None, lambda _: group)
        except KeyboardInterrupt:
            if not self._inside or not partial_results.get():  # not even the clean images were verified
                raise
            _logger.warning("interrupted: returning what is verified so far; `decided` marks the images that are done")
            return self._result(*self._inside[None])

    def finish(self, key: Any, load: Callable[[Any], Group], prefetched: Sequence[Any] = ()) -> AttackResult:
        """Return the result of a key's group, and begin the `prefetched` groups, in order, as slots become free.

        `load` returns the group of a key. A prefetched group that cannot be loaded is tried again when it is the key.
        After an error the scheduler is unusable.
        """
        to_begin = [each for each in (key, *prefetched) if each not in self._inside and each not in self._done]
        while key not in self._done:
            while to_begin and not any(batch.has_enough_images for batch in self._batches):
                begun = to_begin.pop(0)
                try:
                    group = load(begun)
                except Exception as error:
                    if begun == key:
                        raise
                    _logger.info("%s is not prefetched: %s", begun, error)
                else:
                    self.admit(group, begun)
            self.step()
            for each, (group, images) in list(self._inside.items()):
                if all(image.decided for image in images):
                    del self._inside[each]
                    self._done[each] = self._result(group, images)
        result = self._done.pop(key)
        self._done = {each: done for each, done in self._done.items() if each in prefetched}  # others take the rest
        return result

    def step(self) -> None:
        """Take one step of a batch, or verify the queued points if that is due."""
        # Prefer the last full batch, or else the first one: its images then join the others in later batches.
        busy = [batch for batch in self._batches if batch.n_runs]
        full = [batch for batch in busy if batch.has_enough_images]
        if self._queue and (not busy or self._is_due()):
            self._verify()
        elif busy:
            self._queue += (full[-1] if full else busy[0]).step()
            self._cost_of_waiting += _STEP_COST * len(self._queue)

    def _is_due(self) -> bool:
        """Return whether the queued points fill a pass, or whether waiting has cost as much as verifying them."""
        n, sizes = len(self._queue), self.verifier.sizes
        row_cost = 1 if self.shape.float32 is self.shape else _APART_COST
        return n >= sizes.shape.rows or self._cost_of_waiting >= row_cost * sizes.rows_for(n, self._like[:n])

    def _verify(self) -> None:
        """Verify all queued points, cancel the runs that no longer count, and send images on."""
        points, self._queue, self._cost_of_waiting = [each for each in self._queue if each.job.is_open], [], 0
        if not points:
            return
        images = dict.fromkeys(point.job.image for point in points)
        labels = torch.tensor([point.job.image.label for point in points])
        verified = self.verifier.verify(torch.stack([point.x for point in points]), labels)
        for point, *found in zip(points, verified.log1m_margin.tolist(), verified.wrong.tolist(), strict=True):
            point.job.image.take_in(point, *found)
        for batch in {self._blocks[image.block][0] for image in images if image.broken}:
            batch.drop_cancelled()
        for image in images:
            if image.next_job is None and not image.decided:
                self._blocks[image.block][0].n_images -= 1
                self._advance(image)
        if self._progress is not None:
            present = [image for _, images in self._inside.values() for image in images]
            decided = [image.broken for image in present if image.decided]
            self._progress(Progress(len(present), len(decided), sum(decided), *_passes_of(present)))

    def admit(self, group: Group, key: Any = None) -> None:
        """Verify the clean images of a group, and send them on."""
        clean = self.verifier.verify(group.x, group.y)
        known = None if group.known is None else self.verifier.verify(group.known, group.y)
        n_classes = clean.logits.shape[1]
        if not self._blocks:
            self._make_plan(n_classes)
        targets, ranks = ordered_targets(clean.logits, self._budget.n_targets(n_classes), known)
        labels, margins = group.y.tolist(), clean.log1m_margin.tolist()
        each = zip(group.x, labels, group.sample_ids, targets.tolist(), ranks.tolist(), margins, strict=True)
        cost = self.verifier.n_passes
        images = [ImageRecord(self._stop_when_broken, self._seed, *values, cost=cost) for values in each]
        for x_BCHW, verified, where in ((group.x, clean, AS_CLEAN), (group.known, known, AS_KNOWN)):
            if x_BCHW is not None and verified is not None:
                found = (verified.log1m_margin.tolist(), verified.wrong.tolist())
                for image, x, log1m_margin, wrong in zip(images, x_BCHW, *found, strict=True):
                    image.n_forward += cost
                    image.offer(x, log1m_margin, wrong, where)
        self._inside[key] = group, images
        for image in images:
            self._advance(image)

    def _make_plan(self, n_classes: int) -> None:
        model, fast, float32 = self.attacked.model, self.attacked.fast, self.attacked.float32
        setting = Setting(
            self._threat, self._budget, n_classes, model, low_precision=float32 is not None,
            tf32=float32 is not None and float32.tf32,
        )  # fmt: skip
        plan = self._planner(setting, self.attacks)
        self._step_at |= {place: run.attack for place, run in enumerate(plan)}
        models = {False: (fast, PassSizes(self.shape, None if fast.compiled else fast.probe))}
        models[True] = models[False] if float32 is None else (float32, PassSizes(self.shape, float32.probe))
        keys = [(run.stepper, run.float32) for run in plan]  # runs with the same stepper and precision share a batch
        batches = {key: Batch(key[0], *models[key[1]], self._like, self._stop_when_broken) for key in keys}
        self._batches = list(batches.values())

        def block(placed: tuple[int, Run]) -> tuple[Any, str | int]:
            place, run = placed  # a run from the best point needs the results of all runs before it
            return keys[place], place if run.from_best or not run.block else run.block

        together = groupby(enumerate(plan), key=block)
        self._blocks = [(batches[key], list(placed)) for (key, _), placed in together]

    def _advance(self, image: ImageRecord) -> None:
        """Queue the image's runs of the next block in which it takes any; without such a block, it is decided."""
        image.end_block()
        while not (image.broken and self._stop_when_broken) and image.block + 1 < len(self._blocks):
            image.block += 1
            batch, runs = self._blocks[image.block]
            image.jobs = [
                Job(image, at, run) for at, run in runs if run.wanted is None or run.wanted(image.summary(run))
            ]
            if image.jobs:
                image.log1m_margin_before = image.log1m_margin
                batch.n_images += 1
                batch.waiting += image.jobs
                return
        image.decided = True

    def _result(self, group: Group, images: list[ImageRecord]) -> AttackResult:
        """Verify the best points once more. If one is now correct, its image is robust, unless it broke as clean."""
        best = torch.stack([image.best for image in images])
        self._check_inside(best, group.x, images)
        verified = self.verifier.verify(best, group.y)
        broken = verified.wrong | torch.tensor([image.broken_at == AS_CLEAN for image in images])
        steps = [CLEAN, *[WARM_START] * (group.known is not None), *self.attacks]
        place_of = {step: place for place, step in enumerate(steps)}
        # If only this verification finds an image misclassified, the last attack has broken it.
        broken_by = [self._step_at.get(image.broken_at[0], steps[-1]) for image in images]
        broken_at = torch.tensor([place_of.get(step, len(steps) - 1) for step in broken_by])
        survived = {step: (broken_at > place) | ~broken for step, place in place_of.items()}
        device, (n_forward, n_backward) = best.device, _passes_of(images)
        return AttackResult(
            clean=survived.pop(CLEAN).to(device),
            broken=broken.to(device),
            survived={step: left.to(device) for step, left in survived.items()},
            x_adv=best,
            logits=verified.logits.to(device),
            log_one_minus_margin=verified.log1m_margin.to(device),
            n_forward=(n_forward + len(images) * self.verifier.n_passes) * self._n_draws,
            n_backward=n_backward * self._n_draws,
            unconfirmed=(torch.tensor([image.broken for image in images]) & ~broken).to(device),
            decided=torch.tensor([image.decided for image in images]).to(device),
        )

    def _check_inside(self, x_BCHW: Tensor, clean_BCHW: Tensor, images: list[ImageRecord]) -> None:
        """Reject the points of an attack that leaves the ball, by more than rounding, or the range of pixels."""
        ball = ball_of(self._threat)
        rounding = ball.length(torch.full_like(x_BCHW[:1], ULP))  # matters at a tiny radius
        outside_B = ball.length(x_BCHW - clean_BCHW) > _TOO_FAR * ball.eps + rounding
        outside_B |= ((x_BCHW < 0) | (x_BCHW > 1)).flatten(1).any(dim=1)
        for image, outside in zip(images, outside_B.tolist(), strict=True):
            if outside:
                raise InvalidInputError(
                    f"the attack {self._step_at[image.best_at[0]]} returned a point outside of {self._threat} or "
                    "[0, 1]. Project the points in `ask`, or set `stays_inside = False` in the stepper"
                )


def _passes_of(images: Sequence[ImageRecord]) -> tuple[int, int]:
    each = [image.passes() for image in images]
    return sum(n for n, _ in each), sum(n for _, n in each)


def ordered_targets(clean_BK: Tensor, n_targets: int, known: Verified | None) -> tuple[Tensor, Tensor]:
    """Return each image's targets, (B, T), and their ranks on the clean image (2 = runner-up).

    The targets are the classes with ranks 2 .. T + 1 in the clean logits, as published. If a point of an earlier stage
    is known, its logits determine their order.
    """
    by_rank = clean_BK.sort(dim=1, descending=False).indices.flip(1)[:, 1 : n_targets + 1]
    ranks = torch.arange(2, n_targets + 2).expand_as(by_rank)
    if known is None:
        return by_rank, ranks
    order = known.logits.gather(1, by_rank).sort(dim=1, descending=True, stable=True).indices
    return by_rank.gather(1, order), ranks.gather(1, order)

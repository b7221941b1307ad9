"""A batch of runs: slots that take the steps of one stepper together, in passes of one batch shape.

A slot takes steps until its run is over or cancelled. The batch copies a misclassified point together with the number
of passes so far, and the slot continues, so neither outcomes nor counts depend on when the host reads the flags. Slots
without a run pad the batch, and their results are ignored.

Shapes: S slots (rows of a pass), images of C x H x W, K classes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import PassSizes
from ..mixing.margins import log_one_minus_signed_margin
from .attack import Counts, Doubles, Flags, Images, Slots, StartBatch, Stepper, StepResult, copy_rows, sent
from .gradient_model import GradientModel
from .image_record import Job, QueuedPoint

READ_EVERY = 4  # steps, on an accelerator, where reading flags waits for the device; a CPU reads them after each step


@dataclass
class Points(Slots):
    """Results that the batch itself keeps for each slot, with margins in the precision of the passes."""

    best: Images  # where the smallest margin was seen
    log1m_margin: Doubles  # log(1 - margin) there
    wrong: Flags  # whether `best` is misclassified
    queued: Images  # the last misclassified point that was copied for verification
    least_depth: Doubles  # the next point is copied only if its -margin exceeds this: twice that of the last copy
    queued_at: Counts  # the run's number of passes at the last copy; -READ_EVERY without one
    over: Flags  # the run is over, or the slot is free


class Batch:
    """Slots of one stepper on one gradient model, and the runs that wait for them.

    Args:
        sizes: chooses how many rows a pass has.
        like_BCHW: images, to try smaller batch shapes with.
        stop_when_broken: verify misclassified points before their run is over.
    """

    def __init__(
        self, stepper: Stepper[Any], model: GradientModel, sizes: PassSizes, like_BCHW: Tensor, stop_when_broken: bool
    ) -> None:
        self.stepper, self.model, self.sizes, self._stop_when_broken = stepper, model, sizes, stop_when_broken
        self.waiting: list[Job] = []
        self.running: dict[int, Job] = {}  # by slot
        self.n_images = 0  # with runs here
        self.n_steps = 0
        self._like = like_BCHW
        self._read_every = READ_EVERY if like_BCHW.is_cuda else 1  # steps
        self._state, self._points = stepper.init(like_BCHW[:0]), Points.of(like_BCHW[:0])

    @property
    def n_runs(self) -> int:
        """How many runs are in slots or waiting for one."""
        return len(self.running) + len(self.waiting)

    @property
    def has_enough_images(self) -> bool:
        """Whether the images with runs here are at least as many as the rows of a pass."""
        return self.n_images >= self.sizes.shape.rows

    def step(self) -> list[QueuedPoint]:
        """Fill free slots and take one step in each; return the points to verify."""
        self._fill()
        x = self.stepper.ask(self._state)
        result = self._evaluate(x)
        if result is None:
            if self.model.compiled:
                torch.compiler.reset()  # graphs of the larger shape hold their memory
            self.sizes.shape.shrink(len(x))
            return []
        points = self._points
        self._state.n_passes += ~points.over
        self._keep_best(x, result)
        points.over |= self.stepper.tell(self._state, x, result)
        self.n_steps += 1
        # On an accelerator this is the only wait of a step.
        return self._collected() if self.n_steps % self._read_every == 0 else []

    def drop_cancelled(self) -> None:
        """Free the slots of runs that are no longer open for their image, and forget those that wait."""
        self.waiting = [job for job in self.waiting if job.is_open]
        self._free([slot for slot, job in self.running.items() if not job.is_open])

    @property
    def _takes_gradient(self) -> bool:
        every = self.stepper.gradient_every
        return every > 0 and self.n_steps % every == 0

    def _evaluate(self, x: Tensor) -> StepResult | None:
        """One forward pass and, if it is due, one backward pass; None if memory was short."""
        labels, loss_of = self._state.labels, partial(self.stepper.loss, self._state)
        try:
            logits, loss, grad = self.model.evaluate(x, loss_of if self._takes_gradient else None)
        except torch.OutOfMemoryError:
            if len(x) == 1:
                raise
            return None
        logits = logits.float()
        log1m_margin, wrong = log_one_minus_signed_margin(logits, labels), logits.argmax(dim=1) != labels
        return StepResult(logits, log1m_margin, wrong, loss, grad)

    def _keep_best(self, x: Tensor, result: StepResult) -> None:
        """Keep the point with the smallest margin, and copy a misclassified one for verification.

        If two margins are equal, a misclassified point is preferred. A further point is copied only if its margin is
        more than twice as negative, and after at least `READ_EVERY` passes, when the host has read the last copy.
        """
        points, n_passes = self._points, self._state.n_passes
        counts = ~points.over
        if not self.stepper.stays_inside:
            counts &= self.stepper.ball.contains(x, self._state.x)
        better = (result.log1m_margin == points.log1m_margin) & result.wrong & ~points.wrong
        better = counts & (better | (result.log1m_margin > points.log1m_margin))
        copy_rows(points.best, x, better)
        torch.where(better, result.log1m_margin, points.log1m_margin, out=points.log1m_margin)
        torch.where(better, result.wrong, points.wrong, out=points.wrong)
        if self._stop_when_broken:
            depth = result.log1m_margin.expm1()
            deeper = counts & result.wrong & (depth > points.least_depth)
            deeper &= n_passes >= points.queued_at + READ_EVERY
            copy_rows(points.queued, x, deeper)
            torch.where(deeper, 2 * depth, points.least_depth, out=points.least_depth)
            torch.where(deeper, n_passes, points.queued_at, out=points.queued_at)

    def _collected(self) -> list[QueuedPoint]:
        """Read the flags; return new copies and the best points of runs that are over, whose slots become free."""
        points = self._points
        flags = torch.stack([points.over.long(), points.queued_at, self._state.n_passes])
        over, queued_at, n_passes = flags.cpu().tolist()
        copied = [slot for slot, job in self.running.items() if queued_at[slot] > job.n_passes]
        ended = [slot for slot in self.running if over[slot]]
        queued = []
        for slots, pixels, at in ((copied, points.queued, queued_at), (ended, points.best, n_passes)):
            for slot, x in zip(slots, pixels[sent(slots, self._state.labels)] if slots else (), strict=True):
                queued.append(QueuedPoint(self.running[slot], x, at[slot], ends=pixels is points.best))
        for slot, job in self.running.items():
            job.n_passes = n_passes[slot]
        self._free(ended)
        return queued

    def _fill(self) -> None:
        """Choose the smallest batch shape that holds all runs, and give free slots to waiting runs."""
        rows = self.sizes.shape.rows
        if len(self._points.over) > rows:  # memory has run out
            self._resize(rows)
        if not self.running:
            self.n_steps += -self.n_steps % max(self.stepper.gradient_every, 1)
        if self.stepper.gradient_every > 1 and not self._takes_gradient:
            return  # runs begin with a gradient
        wanted = min(self.n_runs, rows)
        n_slots = self.sizes.rows_for(wanted, self._like[:wanted])
        if n_slots != len(self._points.over):
            self._resize(n_slots)
        free = [slot for slot in range(n_slots) if slot not in self.running]
        if self.waiting and free:
            self._start(free)

    def _start(self, free: list[int]) -> None:
        """Begin waiting runs: first the earliest open run of each image, then the others in the order of the plan."""
        order = sorted(self.waiting, key=lambda job: -1 if job is job.image.next_job else job.place)
        jobs, taken = order[: len(free)], {*order[: len(free)]}
        self.waiting = [job for job in self.waiting if job not in taken]
        state, points, like = self._state, self._points, self._state.labels
        slots = sent(free[: len(jobs)], like)
        batch = StartBatch(
            runs=[job.run for job in jobs],
            x=torch.stack([job.image.x for job in jobs]),
            best=torch.stack([job.image.best for job in jobs]),
            keys=sent([job.key for job in jobs], like),
        )
        state.x[slots] = points.best[slots] = batch.x
        state.labels[slots] = sent([job.image.label for job in jobs], like)
        state.targets[slots] = sent([job.target for job in jobs], like)
        state.n_passes[slots], points.queued_at[slots] = 0, -READ_EVERY
        # Margins in different precisions are not comparable, so each run starts without the image's best margin.
        points.log1m_margin[slots], points.least_depth[slots] = -torch.inf, -torch.inf
        points.wrong[slots] = points.over[slots] = False
        self.stepper.start(state, slots, batch)
        self.running.update(zip(free, jobs, strict=False))

    def _resize(self, n_slots: int) -> None:
        """Change the number of slots: move runs to the front; runs without a slot wait and start again."""
        kept, self.waiting = list(self.running)[:n_slots], list(self.running.values())[n_slots:] + self.waiting
        index = sent(kept, self._state.labels)
        self._state.resize(index, n_slots)
        self._points.resize(index, n_slots)
        self._points.over[len(kept) :] = True
        self.running = {slot: self.running[before] for slot, before in enumerate(kept)}

    def _free(self, slots: list[int]) -> None:
        if slots:
            self._points.over[sent(slots, self._state.labels)] = True
            for slot in slots:
                del self.running[slot]

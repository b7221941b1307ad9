"""APGD (Croce & Hein 2020, algorithm 1): gradient ascent that halves its step size if the loss rises too seldom.

A run evaluates its start in iteration 0 and takes the published steps in iterations 1 .. n_iter. `Apgd` computes the
steps, and `SparseApgd` those in L1. Shapes: S slots, images of C x H x W.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..config.register import ATTACKS, LOSSES
from ..config.threat import ThreatModel
from ..norms.ball import MOMENTUM, ball_of, per_image
from ..norms.l1 import project_on_l1, sparse_signs
from .attack import Counts, Flags, Images, Numbers, Run, Setting, SlotState, StartBatch, Stepper, StepResult, copy_rows
from .gradient_model import Outputs
from .losses import anyone

RHO = 0.75  # condition 1: the step is halved if the loss rose in at most this share of the steps

# In L1
FIRST_SHARE = 0.3  # the balls of 3 and of 2 radii each get this share of the iterations; the last ball gets the rest
_SHRINK = 1.5  # a step moves this many times fewer pixels than the best point; a review divides the step size by it
_SPARSER = 0.95  # if the number of moved pixels falls below this share, return to the best point with the longest step
_SHORTEST = 10.0  # a step is at least the radius divided by this

BLOCK = "apgd"  # one block for the runs of all APGD attacks, because none needs the result of another one


@dataclass
class ApgdState(SlotState):
    """APGD's state of each slot. `start` and iteration 0 set all that is read."""

    x_adv: Images  # the point from which the next step starts; for a new slot, the run's start
    displacement: Images  # x_adv minus the point from which the last step started
    grad: Images  # at x_adv
    x_best: Images
    grad_best: Images  # at x_best
    loss_best: Numbers
    loss_prev: Numbers
    loss_at_check: Numbers  # not read at the first review
    reduced: Flags  # whether the last review halved the step
    step_size: Numbers
    n_increases: Counts  # steps since the last review in which the loss rose
    iteration: Counts  # number of the next evaluation
    last: Counts  # number of the last one
    review_steps: Counts  # steps that the next review covers
    next_review: Counts  # the iteration after which it is due
    loss: Counts  # index into `losses`
    scale: Counts  # in L1, the radius of the ball in units of eps
    n_moved: Counts  # in L1, pixels in which the best point differed from the image at the last review
    losses: list[str] = field(default_factory=list)  # names of all losses that any run in the batch has had


@dataclass(frozen=True)
class Apgd(Stepper[ApgdState]):
    """The steps in every norm but L1."""

    first_step: float = 2.0  # in radii
    state_type = ApgdState
    start_scale: ClassVar[int] = 1  # radius of the ball of a random start, in units of eps

    def start(self, state: ApgdState, slots: Tensor, batch: StartBatch) -> None:
        largest = type(self.ball)(self.start_scale * self.ball.eps)
        state.x_adv[slots] = batch.start(largest)
        state.iteration[slots], state.n_increases[slots], state.reduced[slots] = 0, 0, True
        state.last[slots] = self.n_iter
        state.review_steps[slots] = state.next_review[slots] = max(int(0.22 * self.n_iter), 1)
        state.step_size[slots] = self.first_step * self.ball.eps
        state.losses += [name for name in dict.fromkeys(run.loss for run in batch.runs) if name not in state.losses]
        state.loss[slots] = batch.each(lambda run: state.losses.index(run.loss), state.loss)

    def ask(self, state: ApgdState) -> Tensor:
        """Return the start of each new slot and the next point of each other slot; the first step has no momentum."""
        x_new, starting = self._step(state), state.iteration == 0
        return torch.where(per_image(starting, x_new), state.x_adv, x_new) if anyone(starting) else x_new

    def _step(self, state: ApgdState) -> Tensor:
        weight = torch.where(state.iteration <= 1, 1.0, MOMENTUM)
        step_S111, weight_S111 = (per_image(each, state.x) for each in (state.step_size, weight))
        direction = self.ball.steepest(state.grad)
        return self.ball.ascend(state.x, state.x_adv, direction, step_S111, weight_S111, state.displacement)

    def loss(self, state: ApgdState, outputs: Outputs) -> Tensor:
        total = torch.zeros_like(state.loss_best)
        for number, name in enumerate(state.losses):
            chosen = state.loss == number
            if anyone(chosen):
                values = LOSSES.get(name)(outputs, state.labels, state.targets).to(total)
                total = torch.where(chosen, values, total)
        return total

    def tell(self, state: ApgdState, x: Tensor, result: StepResult) -> Tensor:
        """Keep the best point, and review the step size if that is due."""
        loss, stepped = result.loss, state.iteration > 0
        better = ~stepped | (loss > state.loss_best)
        state.grad.copy_(result.grad)
        copy_rows(state.x_best, x, better)
        copy_rows(state.grad_best, state.grad, better)
        torch.where(better, loss, state.loss_best, out=state.loss_best)
        # The first step's loss is compared with 0 instead of the start's loss, because the published code does so.
        state.n_increases += stepped & (loss > state.loss_prev)
        torch.mul(loss, stepped, out=state.loss_prev)
        x_prev, state.x_adv = state.x_adv, x
        self._review(state)
        state.displacement = torch.sub(state.x_adv, x_prev, out=x_prev)
        state.iteration += 1
        return state.iteration > state.last

    def _review(self, state: ApgdState) -> None:
        """Conditions 1 and 2: if the loss rose seldom or stalled, halve the step and return to the best point.

        Each review covers fewer steps than the one before it: of 100, those after 22, 41, 57, 70, 80, 87, 93 and 99.
        """
        due = state.iteration == state.next_review
        if not anyone(due):
            return
        oscillating = state.n_increases <= state.review_steps * RHO
        stalled = ~state.reduced & (state.loss_at_check >= state.loss_best)
        halve = due & (oscillating | stalled)
        torch.where(due, halve, state.reduced, out=state.reduced)
        torch.where(due, state.loss_best, state.loss_at_check, out=state.loss_at_check)
        torch.where(halve, state.step_size / 2, state.step_size, out=state.step_size)
        copy_rows(state.x_adv, state.x_best, halve)
        copy_rows(state.grad, state.grad_best, halve)
        state.n_increases.masked_fill_(due, 0)
        fewer = state.review_steps - max(int(0.03 * self.n_iter), 1)
        state.review_steps = torch.where(due, fewer.clamp(min=max(int(0.06 * self.n_iter), 1)), state.review_steps)
        state.next_review += state.review_steps * due


@dataclass(frozen=True)
class SparseApgd(Apgd):
    """APGD in L1 (Croce & Hein 2021, "Mind the box"): steps that move a few pixels, at first in larger balls.

    A step moves the pixels with the largest gradients, each by the same amount and without momentum. How many depends
    on the number of pixels that the best point so far moved. A run from a random start maximizes the loss in a ball of
    3 radii, then of 2, then of 1, and enters each smaller ball at the projection of its best point.
    """

    stays_inside: ClassVar[bool] = False
    start_scale: ClassVar[int] = 3

    def start(self, state: ApgdState, slots: Tensor, batch: StartBatch) -> None:
        super().start(state, slots, batch)
        from_best = batch.each(lambda run: run.from_best, slots).bool()
        state.scale[slots] = torch.where(from_best, 1, self.start_scale)
        state.last[slots] = torch.where(from_best, self.n_iter, self._first)
        entering = torch.zeros_like(state.reduced).index_fill_(0, slots, True)
        _set_step(state, entering, _n_moved(state.x_adv, state), self._radius(state))

    def _step(self, state: ApgdState) -> Tensor:
        share_S = state.n_moved.to(state.x) / state.x[0].numel() / _SHRINK
        direction = sparse_signs(state.grad, share_S)
        return self._project(state, state.x_adv + per_image(state.step_size, direction) * direction)

    def tell(self, state: ApgdState, x: Tensor, result: StepResult) -> Tensor:
        """Do the same as APGD; slots that have finished a ball continue in the next smaller one."""
        ended = super().tell(state, x, result)
        following = ended & (state.scale > 1)
        if anyone(following):
            state.scale -= following.long()
            state.last[:] = torch.where(following & (state.scale == 1), self.n_iter - 2 * self._first, state.last)
            copy_rows(state.x_adv, self._project(state, state.x_best), following)
            state.iteration.masked_fill_(following, 0)
            _set_step(state, following, _n_moved(state.x_adv, state), self._radius(state))
        return ended & ~following

    def _review(self, state: ApgdState) -> None:
        """If the best point became sparser, return to it with the longest step; otherwise shorten the step."""
        check_every = (0.04 * state.last).long().clamp(min=1)
        due = (state.iteration > 0) & (state.iteration % check_every == 0)
        n_moved, radius = _n_moved(state.x_best, state), self._radius(state)
        sparser = due & (n_moved / state.n_moved < _SPARSER)
        shorter = torch.maximum(state.step_size / _SHRINK, radius / _SHORTEST)
        _set_step(state, due, n_moved, torch.where(sparser, radius, shorter))
        copy_rows(state.x_adv, state.x_best, sparser)
        copy_rows(state.grad, state.grad_best, sparser)

    def _project(self, state: ApgdState, x_adv: Tensor) -> Tensor:
        return project_on_l1(x_adv, state.x, self._radius(state)[:, None])

    def _radius(self, state: ApgdState) -> Tensor:
        return (state.scale.double() * self.ball.eps).to(state.x)

    @property
    def _first(self) -> int:
        """The number of iterations in each ball but the last one."""
        return math.ceil(FIRST_SHARE * self.n_iter)


def _n_moved(x_adv: Tensor, state: ApgdState) -> Tensor:
    """Return the number of pixels that differ from the clean image, (S,)."""
    return (x_adv != state.x).flatten(1).sum(dim=1)


def _set_step(state: ApgdState, chosen: Tensor, n_moved: Tensor, step_size: Tensor) -> None:
    """Set the length and the sparsity of the next steps of the chosen slots."""
    torch.where(chosen, n_moved, state.n_moved, out=state.n_moved)
    torch.where(chosen, step_size, state.step_size, out=state.step_size)


def stepper_for(threat: ThreatModel, n_iter: int, first_step: float = 2.0) -> Apgd:
    """Return the stepper for the norm of the threat model."""
    return (SparseApgd if ball_of(threat).sparse else Apgd)(threat, n_iter, first_step)


def apgd_runs(name: str, setting: Setting, loss: str) -> list[Run]:
    """Return runs from `n_restarts` random starts that maximize a registered loss."""
    stepper, restarts = stepper_for(setting.threat, setting.budget.n_iter), range(setting.budget.n_restarts)
    return [Run(name, stepper, restart=i, block=BLOCK, loss=loss) for i in restarts]


@ATTACKS("apgd-ce", options=("n_iter", "n_restarts"), order=1)
def apgd_ce(setting: Setting) -> list[Run]:
    """APGD on cross-entropy."""
    return apgd_runs("apgd-ce", setting, "ce")


@ATTACKS("apgd-dlr", options=("n_iter", "n_restarts"), order=8)
def apgd_dlr(setting: Setting) -> list[Run]:
    """APGD on the untargeted DLR loss."""
    return apgd_runs("apgd-dlr", setting, "untargeted-dlr")


@ATTACKS("apgd-t", options=("n_iter", "n_target_classes"), order=2, then_on_mixtures=("joint",))
def apgd_t(setting: Setting) -> list[Run]:
    """APGD on the targeted DLR loss."""
    stepper = stepper_for(setting.threat, setting.budget.n_iter)
    return [Run("apgd-t", stepper, target, block=BLOCK, loss="dlr") for target in setting.targets]

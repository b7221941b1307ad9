"""APGD (Croce & Hein 2020, algorithm 1) as the state of many independent examples and one step for all of them.

Each example is at its own iteration. One round is `propose` -> forward and backward by the caller -> `absorb`.
Iteration 0 evaluates the start; iterations 1 .. n_iter are the published ones.

Shapes: S slots (examples under attack), images of C x H x W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..threat import ThreatModel
from .projections import per_image, project, steepest
from .rows import Rows, anyone

MOMENTUM = 0.75  # weight of the new step against the last displacement


@dataclass(frozen=True)
class ApgdSchedule:
    """When the step size is reviewed, for a budget of `n_iter` iterations; `rho` as in condition 1 of the paper."""

    n_iter: int = 100
    rho: float = 0.75

    @property
    def first_check(self) -> int:
        return max(int(0.22 * self.n_iter), 1)

    @property
    def min_check(self) -> int:
        return max(int(0.06 * self.n_iter), 1)

    @property
    def check_decrease(self) -> int:
        return max(int(0.03 * self.n_iter), 1)


@dataclass
class ApgdState(Rows):
    """All that APGD remembers of each slot; the first axis of every field is the slot."""

    x: Tensor  # clean image, centre of the ball
    x_adv: Tensor  # where the next step starts from; for a new slot its start
    x_prev: Tensor  # where the last step started from
    x_best: Tensor
    grad: Tensor
    grad_best: Tensor
    loss_best: Tensor
    loss_prev: Tensor
    loss_at_check: Tensor
    reduced: Tensor  # bool: the last review halved the step
    step_size: Tensor
    n_increases: Tensor  # of the loss since the last review
    since_check: Tensor
    check_every: Tensor
    iteration: Tensor  # of the evaluation that is due

    @classmethod
    def start(
        cls, x: Tensor, x_start: Tensor, threat: ThreatModel, schedule: ApgdSchedule, first_step: float = 2.0
    ) -> "ApgdState":
        """New slots at `x_start`, nothing evaluated yet; the first step is `first_step` radii long."""
        zeros_S = x.new_zeros(len(x))
        counts_S, steps_S = zeros_S.long(), torch.full_like(zeros_S, first_step * threat.eps)
        return cls(
            x=x, x_adv=x_start, x_prev=x_start, x_best=x_start,
            grad=torch.zeros_like(x), grad_best=torch.zeros_like(x),
            loss_best=zeros_S, loss_prev=zeros_S, loss_at_check=zeros_S,
            reduced=torch.ones_like(counts_S, dtype=torch.bool), step_size=steps_S,
            n_increases=counts_S, since_check=counts_S,
            check_every=torch.full_like(counts_S, schedule.first_check), iteration=counts_S,
        )  # fmt: skip


def propose(state: ApgdState, threat: ThreatModel) -> Tensor:
    """Where each slot wants to be evaluated next: its start, or one momentum step from `x_adv`."""
    first_S = per_image(state.iteration <= 1, state.x)
    displacement = state.x_adv - state.x_prev
    step = per_image(state.step_size, state.x) * steepest(state.grad, threat.norm)
    z = project(state.x_adv + step, state.x, threat)
    a = torch.where(first_S, 1.0, MOMENTUM)
    stepped = project(state.x_adv + (z - state.x_adv) * a + displacement * (1 - a), state.x, threat)
    return torch.where(per_image(state.iteration == 0, state.x), state.x_adv, stepped)


def absorb(state: ApgdState, x_new: Tensor, loss: Tensor, grad: Tensor, schedule: ApgdSchedule) -> None:
    """Take in the loss and the gradient at `x_new`, keep the best point, and review the step size where that is due."""
    starting = state.iteration == 0
    better = starting | (loss > state.loss_best)
    better_image = per_image(better, state.x)
    state.x_prev = torch.where(per_image(starting, state.x), x_new, state.x_adv)
    state.x_adv, state.grad = x_new, grad
    state.x_best = torch.where(better_image, x_new, state.x_best)
    state.grad_best = torch.where(better_image, grad, state.grad_best)
    state.loss_best = torch.where(better, loss, state.loss_best)
    state.loss_at_check = torch.where(starting, loss, state.loss_at_check)
    # The published code compares the first step's loss with 0, not with the start's: kept, so that iterates agree.
    state.n_increases = state.n_increases + (~starting & (loss > state.loss_prev))
    state.loss_prev = torch.where(starting, torch.zeros_like(loss), loss)
    state.since_check = state.since_check + ~starting
    state.iteration = state.iteration + 1
    _review(state, schedule)


def _review(state: ApgdState, schedule: ApgdSchedule) -> None:
    """Conditions 1 and 2: halve the step and go back to the best point where the loss rose too seldom or stalled."""
    due = state.since_check == state.check_every
    if not anyone(due):
        return
    oscillating = state.n_increases <= state.check_every * schedule.rho
    stalled = ~state.reduced & (state.loss_at_check >= state.loss_best)
    halve = due & (oscillating | stalled)
    halve_image = per_image(halve, state.x)
    state.reduced = torch.where(due, halve, state.reduced)
    state.loss_at_check = torch.where(due, state.loss_best, state.loss_at_check)
    state.step_size = torch.where(halve, state.step_size / 2, state.step_size)
    state.x_adv = torch.where(halve_image, state.x_best, state.x_adv)
    state.grad = torch.where(halve_image, state.grad_best, state.grad)
    shorter = (state.check_every - schedule.check_decrease).clamp(min=schedule.min_check)
    state.check_every = torch.where(due, shorter, state.check_every)
    state.since_check = torch.where(due, 0, state.since_check)
    state.n_increases = torch.where(due, 0, state.n_increases)

"""APGD's steps (Croce & Hein 2020, algorithm 1): gradient ascent whose step halves where the loss rises too seldom.

Each slot is at its own iteration. Iteration 0 evaluates the start; iterations 1 .. n_iter are the published ones.

Shapes: S slots, images of C x H x W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..config.register import LOSSES
from ..norms.ball import MOMENTUM, Ball, per_image
from .gradient_model import Outputs
from .losses import anyone
from .stepper import Counts, Flags, Images, Numbers, SlotState, StartBatch, Stepper, StepResult, copy_rows, sent

RHO = 0.75  # condition 1: the step halves where the loss rose in fewer than this share of the steps


@dataclass
class ApgdState(SlotState):
    """APGD's state of each slot."""

    anchors: Tensor  # what the norm needs of the clean image
    x_adv: Images  # where the next step starts from; for a new slot its start
    displacement: Images  # from where the last step started to x_adv
    x_new: Images  # where the slot wants to be evaluated
    direction: Images  # steepest ascent at x_adv, with unit length in the norm
    x_best: Images
    direction_best: Images  # at x_best
    loss_best: Numbers
    loss_prev: Numbers
    loss_at_check: Numbers
    reduced: Flags  # the last review halved the step
    step_size: Numbers
    n_increases: Counts  # steps since the last review in which the loss rose
    iteration: Counts  # number of the next evaluation
    loss: Counts  # index into `losses`
    # For sparse steps only
    stage: Counts  # 3, 2, 1: in the first, second and last ball; 0: in the last ball with all iterations
    share: Numbers  # share of the pixels that a step moves
    n_moved: Counts  # pixels in which the best point differed from the image at the last review
    losses: list[str]  # those that any slot has had


@dataclass(frozen=True)
class Apgd(Stepper[ApgdState]):
    """The steps of all APGD runs except those in L1; `apgd.py` plans the runs."""

    n_iter: int = 100
    first_step: float = 2.0  # in radii

    @property
    def start_ball(self) -> Ball:
        """Where random starts are drawn."""
        return self.ball

    def init(self, like_SCHW: Tensor) -> ApgdState:
        return ApgdState.of(like_SCHW, anchors=self.ball.anchors(torch.zeros_like(like_SCHW)), losses=[])

    def start(self, state: ApgdState, slots: Tensor, batch: StartBatch) -> None:
        start = batch.start(self.start_ball, self.seed)
        state.anchors[slots], state.x_adv[slots] = self.ball.anchors(batch.x), self.ball.settled(start, batch.x)
        for values in (state.direction, state.displacement):  # so that iteration 0 evaluates the start itself
            values[slots] = 0
        for values in (state.loss_best, state.loss_prev, state.loss_at_check, state.n_increases, state.iteration):
            values[slots] = 0
        state.reduced[slots] = True
        state.step_size[slots] = self.first_step * self.ball.eps
        names = [run.loss for run in batch.runs]
        state.losses += [name for name in dict.fromkeys(names) if name not in state.losses]
        state.loss[slots] = sent([state.losses.index(name) for name in names], state.loss)

    def ask(self, state: ApgdState) -> Tensor:
        """The norm's step; a new slot's start itself. The first step has no momentum."""
        step, weight = state.step_size, torch.where(state.iteration <= 1, 1.0, MOMENTUM)
        x_new = self.ball.ascend(
            state.x_adv, state.direction, per_image(step, state.x_adv), per_image(weight, state.x_adv),
            state.displacement, state.anchors, out=state.x_new,
        )  # fmt: skip
        starting = state.iteration == 0
        return torch.where(per_image(starting, x_new), state.x_adv, x_new, out=x_new) if anyone(starting) else x_new

    def loss(self, state: ApgdState, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:
        total, weights = None, torch.ones_like(state.loss_best)
        on_host = state.loss.device.type == "cpu"
        for number in sorted(set(state.loss.tolist())) if on_host else range(len(state.losses)):
            loss: Callable[..., Tensor] = LOSSES.get(state.losses[number])
            values = loss(outputs, labels, targets, weights).to(state.loss_best)
            total = values if total is None else torch.where(state.loss == number, values, total)
        assert total is not None
        return total

    def tell(self, state: ApgdState, x: Tensor, result: StepResult) -> Tensor:
        """Keep the best point, and review the step size if that is due."""
        loss, stepped = result.loss, state.iteration > 0
        better = ~stepped | (loss > state.loss_best)
        state.direction = self._direction(result.grad)
        copy_rows(state.x_best, x, better)
        copy_rows(state.direction_best, state.direction, better)
        torch.where(better, loss, state.loss_best, out=state.loss_best)
        # The published code compares the first step's loss with 0, not with the start's: kept, so that iterates agree.
        state.n_increases += stepped & (loss > state.loss_prev)
        torch.mul(loss, stepped, out=state.loss_prev)
        x_prev, state.x_adv, state.x_new = state.x_adv, state.x_new, state.displacement  # the buffers change places
        self._review(state)
        state.displacement = torch.sub(state.x_adv, x_prev, out=x_prev)
        state.iteration += 1
        return state.iteration > self._last(state)

    def _direction(self, grad: Tensor) -> Tensor:
        """Return what `ask` needs of a gradient, in new memory."""
        return self.ball.steepest(grad)

    def _last(self, state: ApgdState) -> Tensor | int:  # noqa: ARG002
        """Return the last iteration of each slot."""
        return self.n_iter

    def _review(self, state: ApgdState) -> None:
        """Conditions 1 and 2: if the loss rose seldom or stalled, halve the step and return to the best point."""
        n_steps = sent(reviews(self.n_iter), state.iteration)[state.iteration.clamp(max=self.n_iter)]
        due = n_steps > 0
        if not anyone(due):
            return
        oscillating = state.n_increases <= n_steps * RHO
        stalled = ~state.reduced & (state.loss_at_check >= state.loss_best)
        halve = due & (oscillating | stalled)
        torch.where(due, halve, state.reduced, out=state.reduced)
        torch.where(due, state.loss_best, state.loss_at_check, out=state.loss_at_check)
        torch.where(halve, state.step_size / 2, state.step_size, out=state.step_size)
        copy_rows(state.x_adv, state.x_best, halve)
        copy_rows(state.direction, state.direction_best, halve)
        state.n_increases.masked_fill_(due, 0)


@cache
def reviews(n_iter: int) -> list[int]:
    """Return, by iteration, the number of steps that a review after it looks back on; 0 if no review is due.

    Example:
        >>> [i for i, n_steps in enumerate(reviews(100)) if n_steps]
        [22, 41, 57, 70, 80, 87, 93, 99]
    """
    steps, least, due = max(int(0.22 * n_iter), 1), max(int(0.06 * n_iter), 1), 0
    n_steps = [0] * (n_iter + 1)
    while (due := due + steps) <= n_iter:
        n_steps[due] = steps
        steps = max(steps - max(int(0.03 * n_iter), 1), least)
    return n_steps

"""APGD in L1 (Croce & Hein 2021, "Mind the box"): steps along a few pixels, from balls that are too large to the ball.

The steepest direction in L1 moves one pixel, and the box soon stops it. So a step moves a share of the pixels, those of
the largest gradients, each by the same amount; the share follows the sparsity of the best point so far. There is no
momentum. Runs from a random start climb in balls of 3, 2 and 1 radii, one after the other, each from the best point of
the one before it, projected; only points in the last ball can count.

Shapes: S slots, images of C x H x W.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..config.threat import ThreatModel
from ..norms.ball import Ball, ball_of, per_image
from ..norms.l1 import sparse_signs
from .ascent import Apgd, ApgdState
from .losses import anyone
from .stepper import StartBatch, StepResult, copy_rows, sent

# Share of the iterations in the ball of 3 radii, and of those in the ball of 2. The last ball has the rest.
FIRST_SHARE = 0.3
_RADII = (1, 1, 2, 3)  # by `ApgdState.stage`
_SHRINK = 1.5  # divides the number of pixels that the best point moved, and the step size
_SPARSER = 0.95  # share of moved pixels below which a run returns to its best point, with the longest step
_SHORTEST = 10.0  # a step is no shorter than a radius divided by this


@dataclass(frozen=True)
class SparseApgd(Apgd):
    """The steps of APGD's runs in a norm whose steps are sparse."""

    stays_inside: ClassVar[bool] = False

    @cached_property
    def balls(self) -> list[Ball]:
        """The ball of each stage."""
        return [ball_of(ThreatModel(self.threat.norm, radii * self.threat.eps)) for radii in _RADII]

    @property
    def start_ball(self) -> Ball:
        """Random starts are in the largest ball."""
        return self.balls[-1]

    def start(self, state: ApgdState, slots: Tensor, batch: StartBatch) -> None:
        """Begin a random start in the largest ball, and a best point in the ball itself."""
        super().start(state, slots, batch)
        state.stage[slots] = sent([0 if run.from_best else 3 for run in batch.runs], slots)
        self._enter(state, torch.zeros_like(state.reduced).index_fill_(0, slots, True))

    def ask(self, state: ApgdState) -> Tensor:
        """P(x_adv + step d), d sparse and of length 1; the start of a ball itself."""
        direction = sparse_signs(state.direction, state.share)
        moved = state.x_adv + per_image(state.step_size, direction) * direction
        x_new = self._project(moved, state)
        starting = per_image(state.iteration == 0, x_new)
        return torch.where(starting, state.x_adv, x_new, out=state.x_new)

    def tell(self, state: ApgdState, x: Tensor, result: StepResult) -> Tensor:
        """As APGD; slots that have ended a ball continue in the next smaller one."""
        ended = super().tell(state, x, result)
        following = ended & (state.stage > 1)
        if anyone(following):
            copy_rows(state.x_adv, state.x_best, following)
            state.stage -= following.long()
            copy_rows(state.x_adv, self._project(state.x_adv, state), following)
            state.iteration.masked_fill_(following, 0)
            self._enter(state, following)
        return ended & ~following

    def _direction(self, grad: Tensor) -> Tensor:
        """Return the gradient itself, because a step decides how many pixels it moves."""
        return grad.clone()

    def _last(self, state: ApgdState) -> Tensor:
        first = math.ceil(FIRST_SHARE * self.n_iter)
        lengths = (self.n_iter, self.n_iter - 2 * first, first, first)
        return sent(lengths, state.stage)[state.stage]

    def _review(self, state: ApgdState) -> None:
        """If the best point became sparser, return to it with the longest step; otherwise shorten the step."""
        n_moved = self._moved(state.x_best, state)
        check_every = (0.04 * self._last(state)).long().clamp(min=1)
        due = (state.iteration > 0) & (state.iteration % check_every == 0)
        sparser = due & (n_moved / state.n_moved < _SPARSER)
        longest = self._radius(state)
        shorter = torch.maximum(state.step_size / _SHRINK, longest / _SHORTEST)
        torch.where(due, torch.where(sparser, longest, shorter), state.step_size, out=state.step_size)
        torch.where(due, n_moved, state.n_moved, out=state.n_moved)
        torch.where(due, self._share(n_moved, state), state.share, out=state.share)
        copy_rows(state.x_adv, state.x_best, sparser)
        copy_rows(state.direction, state.direction_best, sparser)

    def _enter(self, state: ApgdState, chosen: Tensor) -> None:
        """Set the step size and the sparsity of slots that enter a ball."""
        n_moved = self._moved(state.x_adv, state)
        torch.where(chosen, n_moved, state.n_moved, out=state.n_moved)
        torch.where(chosen, self._share(n_moved, state), state.share, out=state.share)
        torch.where(chosen, self._radius(state), state.step_size, out=state.step_size)

    @staticmethod
    def _moved(x_adv: Tensor, state: ApgdState) -> Tensor:
        """Pixels that differ from the clean image, (S,)."""
        return (x_adv != state.anchors[:, 0]).flatten(1).sum(dim=1)

    @staticmethod
    def _share(n_moved: Tensor, state: ApgdState) -> Tensor:
        return n_moved.to(state.share) / state.x_adv[0].numel() / _SHRINK

    def _radius(self, state: ApgdState) -> Tensor:
        return self.threat.eps * state.stage.clamp(min=1).to(state.step_size)

    def _project(self, x_adv: Tensor, state: ApgdState) -> Tensor:
        """Project each slot on its own ball."""
        projected = x_adv
        for stage, ball in enumerate(self.balls):
            here = state.stage == stage
            if anyone(here):
                inside = ball.project(x_adv, state.anchors[:, 0])
                projected = torch.where(per_image(here, x_adv), inside, projected)
        return projected

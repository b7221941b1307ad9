"""PGD (Madry et al. 2018): gradient ascent with one step length; APGD's plain predecessor.

Shapes: S slots, images of C x H x W.
"""

# ruff: noqa: ARG002, ARG004 - what is registered is given more than it may need

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.register import ATTACKS
from .attack import Arrivals, Attack, Seen, SlotArrays
from .budget import AttackBudget
from .gradient_model import Outputs
from .losses import ce_loss

ITERATIONS = 20
STEP = 1 / 4  # of eps: 2/255 of 8/255


@dataclass
class PgdState(SlotArrays):
    """What PGD remembers of each slot."""

    x: Tensor  # clean image
    x_adv: Tensor
    iteration: Tensor  # of the evaluation that is due; 0 is the start's


@ATTACKS("pgd-20", describes="20 PGD steps of eps / 4 on cross-entropy", options=(), order=5)
class Pgd(Attack):
    """PGD (Madry et al. 2018) as the field runs it for "PGD-20".

    From APGD's random start along the gradient of the cross-entropy; the best point is kept, not the last.
    """

    name = "pgd-20"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        return ITERATIONS + 1, ITERATIONS + 1

    def state(self, like_SCHW: Tensor) -> PgdState:
        iteration = torch.zeros(len(like_SCHW), dtype=torch.long, device=like_SCHW.device)
        return PgdState(like_SCHW.new_zeros(like_SCHW.shape), like_SCHW.new_zeros(like_SCHW.shape), iteration)

    def begin(self, state: PgdState, slots: Tensor, arrivals: Arrivals) -> None:
        state.x[slots], state.x_adv[slots] = arrivals.x, arrivals.random_start(self.setting)
        state.iteration[slots] = 0

    def propose(self, state: PgdState) -> Tensor:
        return state.x_adv

    def objective(self, state: PgdState, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:
        return ce_loss(outputs.logits, labels)

    def absorb(self, state: PgdState, x_new: Tensor, seen: Seen) -> Tensor:
        ball = self.setting.ball
        state.x_adv = ball.project(x_new + STEP * ball.eps * ball.steepest(seen.grad), state.x)
        state.iteration += 1
        return state.iteration > ITERATIONS

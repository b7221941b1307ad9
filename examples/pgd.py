"""An attack of your own in one file: PGD-20 (Madry et al. 2018), gradient ascent with a fixed step length.

Name this file in a configuration and the attack among those of the evaluation:

    extensions: [examples/pgd.py]
    evaluate: {attacks: [pgd-20, apgd-t]}

Shapes: S slots, images of C x H x W.
"""

# ruff: noqa: ARG002, ARG004 - a registered attack receives arguments that PGD does not need

from dataclasses import dataclass

import torch
from torch import Tensor

from mixednuts_dist.attacks.attack import Arrivals, Attack, Seen, SlotArrays
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import Outputs
from mixednuts_dist.attacks.losses import ce_loss
from mixednuts_dist.config.register import ATTACKS

ITERATIONS = 20
STEP = 1 / 4  # of eps: 2/255 of 8/255


@dataclass
class PgdState(SlotArrays):
    """The state of each slot."""

    x: Tensor  # clean image
    x_adv: Tensor
    iteration: Tensor  # of the evaluation that is due; 0 is the start's


@ATTACKS("pgd-20", describes="20 PGD steps of eps / 4 on cross-entropy", options=())
class Pgd(Attack):
    """Take 20 steps along the gradient of the cross-entropy from a random start; the engine keeps the best point."""

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

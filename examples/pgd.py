"""Add an attack in one file: PGD-20 (Madry et al. 2018), gradient ascent with a fixed step length.

Name this file in a configuration, and add the attack to those of the evaluation:

    extensions: [examples/pgd.py]
    evaluate: {attacks: [pgd-20, apgd-t]}

Shapes: S slots, images of C x H x W.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from mixednuts_dist.attacks.attack import Images, Run, Setting, SlotState, StartBatch, Stepper, StepResult
from mixednuts_dist.attacks.gradient_model import Outputs
from mixednuts_dist.config.register import ATTACKS

ITERATIONS = 20
STEP = 1 / 4  # relative to eps, so 2/255 at 8/255


@dataclass
class PgdState(SlotState):
    """The state of each slot; the scheduler also keeps `x`, `labels`, `targets` and `n_passes`."""

    x_adv: Images


class PgdSteps(Stepper[PgdState]):
    """The rule for the steps, which have a quarter of the radius as their length."""

    state_type = PgdState

    def start(self, state: PgdState, slots: Tensor, batch: StartBatch) -> None:
        state.x_adv[slots] = batch.start(self.ball)

    def ask(self, state: PgdState) -> Tensor:
        return state.x_adv

    def loss(self, state: PgdState, outputs: Outputs) -> Tensor:
        return F.cross_entropy(outputs.logits, state.labels, reduction="none")

    def tell(self, state: PgdState, x: Tensor, result: StepResult) -> Tensor:
        step = STEP * self.ball.eps * self.ball.steepest(result.grad)
        state.x_adv = self.ball.project(x + step, state.x)
        return state.n_passes > self.n_iter


@ATTACKS("pgd-20", describes="20 PGD steps of eps / 4 on cross-entropy", options=())
def pgd_20(setting: Setting) -> list[Run]:
    """Take 20 steps along the gradient of the cross-entropy from a random start; the scheduler keeps the best x_adv."""
    return [Run("pgd-20", PgdSteps(setting.threat, ITERATIONS))]

"""The joint attack on mixed classifiers, for images that the attacks on the surrogate do not break.

If the standard classifier is one-hot (T = 0), class k beats the label y if it is the standard classifier's class and
the robust classifier's margin is small: alpha (p_y - p_k) < 1 - alpha. The surrogate's loss can rise while one of
these conditions comes closer and the other one moves away. This attack's loss is largest only if both hold.

The loss has a kink where the standard classifier's class changes to k. There, APGD halves its step too early and stays
on one side. So the steps follow the norm's steepest direction for a momentum (Dong et al. 2018), and their length falls
to 0 as half a cosine.

Shapes: B images of C x H x W, S slots, K classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..mixing.margins import at, others
from ..norms.ball import per_image
from .attack import Images, ImageSummary, Numbers, Run, Setting, SlotState, StartBatch, Stepper, StepResult
from .gradient_model import MixedOutputs

MOMENTUM = 0.75  # the factor of the sum of earlier gradients at each step
FIRST_STEP = 0.5  # in radii of the ball
MOST_STEPS = 33  # steps per run; they broke as many images as 100
# (weight of the standard classifier's margin, whether to start from the best point so far), in the order of the runs.
# Each turn has one run per target. With AutoAttack's budget, the limit on passes (see `joint`) ends the third turn.
TURNS = ((1.0, False), (1.0, True), (3.0, False), (0.1, True), (0.1, False))


@dataclass
class JointState(SlotState):
    """The joint attack's state of each slot."""

    x_adv: Images  # to be evaluated next
    momentum: Images
    weight: Numbers  # multiplies the standard classifier's margin


@dataclass(frozen=True)
class JointSteps(Stepper[JointState]):
    """The steps of all runs."""

    state_type = JointState

    def start(self, state: JointState, slots: Tensor, batch: StartBatch) -> None:
        state.x_adv[slots] = batch.start(self.ball)
        state.momentum[slots] = 0
        state.weight[slots] = batch.each(lambda run: run.weight, state.weight)

    def ask(self, state: JointState) -> Tensor:
        return state.x_adv

    def loss(self, state: JointState, outputs: MixedOutputs) -> Tensor:  # type: ignore[override]
        """Return `log(1 - (p_y - p_k)) + w min(0, g_k - max_{j != k} g_j)`, for label y, target k and weight w.

        p are the transformed robust probabilities, and g are the standard logits. 1 - (p_y - p_k) is 2 p_k plus the
        p_j of all classes except y and k. All terms are positive, so the loss does not saturate if p_y is close to 1.
        """
        std_SK, rob_SK = outputs.std_logits.double(), outputs.rob_logits.double()
        log_probs_SK: Tensor = outputs.mixed.transform(rob_SK).log_softmax(dim=1)
        twice_SK = torch.zeros_like(log_probs_SK).scatter(1, state.targets[:, None], math.log(2))
        twice_SK = twice_SK.scatter(1, state.labels[:, None], -torch.inf)
        std_lead_S = at(std_SK, state.targets) - others(std_SK, state.targets).amax(dim=1)
        loss_S = (log_probs_SK + twice_SK).logsumexp(dim=1) + state.weight * std_lead_S.clamp(max=0)
        return loss_S.to(state.weight)

    def tell(self, state: JointState, x: Tensor, result: StepResult) -> Tensor:
        ball = self.ball
        mean = result.grad.abs().flatten(1).mean(dim=1).clamp_min(torch.finfo(result.grad.dtype).tiny)
        state.momentum.mul_(MOMENTUM).add_(result.grad / per_image(mean, result.grad))
        step = 0.5 * FIRST_STEP * ball.eps * (1 + (math.pi * ((state.n_passes - 1) / self.n_iter)).cos())
        moved = x + per_image(step, x) * ball.steepest(state.momentum)
        state.x_adv.copy_(ball.project(moved, state.x))
        return state.n_passes > self.n_iter


@ATTACKS("joint", order=6, mixtures_only=True, options=("n_iter", "n_target_classes", "joint_starts"))
def joint(setting: Setting) -> list[Run]:
    """Momentum steps on both base classifiers of a mixed classifier.

    Only images that a changed vote could make borderline are attacked, from random points and from the best points.
    All runs on an image together take no more passes than APGD-T. Runs beyond this limit are left out.
    """

    def wanted(image: ImageSummary) -> bool:
        # If the standard classifier's class changes from the label to k, the margin falls by up to 2 (1 - alpha).
        return setting.is_borderline(image, slack=2 * float(setting.model.mixture.one_minus_alpha))

    budget = setting.budget
    stepper = JointSteps(setting.threat, min(budget.n_iter, MOST_STEPS))
    runs = [
        Run("joint", stepper, target, number // 2, from_best=from_best, weight=weight, wanted=wanted)
        for number, (weight, from_best) in enumerate(TURNS[: 2 * budget.joint_starts], start=1)
        for target in setting.targets
    ]
    return runs[: (budget.n_iter + 1) * len(setting.targets) // (stepper.n_iter + 1)]

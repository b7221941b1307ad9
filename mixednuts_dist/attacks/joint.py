"""The joint attack on the mixed classifier, for images that attacks along the surrogate's gradient do not break.

With a one-hot std (T = 0) class k beats the label y where std's class is k and rob's gap is small: alpha (p_y - p_k) <
1 - alpha. Both must hold at the same point. The surrogate's loss can rise by one of them at the cost of the other; the
loss "joint" is largest only where both hold.

Its best points lie where std's class has just changed to k. There the loss has a kink, and APGD, which halves its step
when the loss rises too seldom, stays on one side of it. So the steps here have a fixed schedule: along the sign of a
momentum (Dong et al. 2018), with a length that falls to 0 as half a cosine. Of 30 CIFAR-10 images next to a mixture's
decision border such steps broke 2 or 3 with each of nine losses and weights, and APGD none with any of eight.

Shapes: B images of C x H x W, S slots, K classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.register import ATTACKS, LOSSES
from ..mixing.classifier import MixedClassifier
from ..norms.ball import Ball, per_image
from .attack import NEAR_BORDER, Arrivals, Attack, Known, Phase, Seen, SlotArrays, sent
from .budget import AttackBudget
from .gradient_model import Outputs

MOMENTUM = 0.75  # the factor of the sum of earlier gradients at each step
FIRST_STEP = 0.5  # in radii of the ball
MOST_STEPS = 33  # of an attempt: they broke what 100 did, and within APGD-T's number of passes allow several attempts
# (weight of std's gap, whether to start from the best point so far), in the order of the attempts. No weight is best:
# of 150 digits next to the cutoff one attempt a target broke 4 at weights 1 and 3, and 0 to 3 at .3 and less.
TURNS = ((1.0, False), (1.0, True), (3.0, False), (0.1, True), (0.1, False))


@dataclass(frozen=True)
class JointPhase(Phase):
    """One attempt of the joint attack."""

    n_iter: int = 100
    from_best: bool = False  # start at the best point so far, not at a random one
    weight: float = 1.0  # of std's gap


@dataclass
class JointState(SlotArrays):
    """The joint attack's state of each slot."""

    x: Tensor  # clean image
    x_adv: Tensor  # to be evaluated next
    momentum: Tensor
    iteration: Tensor  # number of the next evaluation; 0 is that of the starting point
    n_iter: Tensor
    weight: Tensor


@ATTACKS(
    "joint", describes="momentum steps on rob's gap and std's together; mixtures only", order=6,
    mixtures_only=True, options=("n_iter", "n_target_classes", "joint_starts"),
)  # fmt: skip
class Joint(Attack):
    """Attempts from random points and from the best points, on standing images near the decision border.

    All runs on an image together take no more passes than APGD-T.
    """

    name = "joint"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        steps = (budget.n_iter + 1) * budget.n_targets(n_classes) if budget.joint_starts else 0
        return steps, steps

    def phases(self) -> Sequence[Phase]:
        setting, budget = self.setting, self.setting.budget
        if not isinstance(setting.model, MixedClassifier) or not budget.joint_starts:
            return []
        n_iter, targets = min(budget.n_iter, MOST_STEPS), range(1, budget.n_targets(setting.n_classes) + 1)
        wanted, n_random = can_win(setting.model), 0
        plan: list[Phase] = []
        for weight, from_best in TURNS:
            if not from_best and n_random == budget.joint_starts:
                break
            plan += [
                JointPhase(
                    self.name, "joint/{rank}", self, target=target, restart=n_random, wanted=wanted,
                    n_iter=n_iter, from_best=from_best, weight=weight,
                )
                for target in targets
            ]  # fmt: skip
            n_random += not from_best
        return plan[: self.passes(budget, setting.n_classes)[1] // (n_iter + 1)]

    def state(self, like_SCHW: Tensor) -> JointState:
        def images() -> Tensor:
            return like_SCHW.new_zeros(like_SCHW.shape)

        def numbers(dtype: torch.dtype | None = None) -> Tensor:
            return like_SCHW.new_zeros(len(like_SCHW), dtype=dtype)

        return JointState(
            x=images(), x_adv=images(), momentum=images(),
            iteration=numbers(torch.long), n_iter=numbers(torch.long), weight=numbers(),
        )  # fmt: skip

    def start_ball(self, phase: JointPhase) -> Ball | None:
        return None if phase.from_best else self.setting.ball

    def begin(self, state: JointState, slots: Tensor, arrivals: Arrivals) -> None:
        phases = arrivals.phases
        start = arrivals.best.clone()
        drawn = [i for i, phase in enumerate(phases) if not phase.from_best]
        if drawn:
            start[sent(drawn, slots)] = arrivals.at(drawn).random_start(self.setting)
        state.x[slots], state.x_adv[slots] = arrivals.x, start
        state.momentum[slots], state.iteration[slots] = 0, 0
        for values, name in ((state.n_iter, "n_iter"), (state.weight, "weight")):
            values[slots] = sent([getattr(phase, name) for phase in phases], values)

    def propose(self, state: JointState) -> Tensor:
        return state.x_adv

    def objective(self, state: JointState, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:
        loss: Callable[..., Tensor] = LOSSES.get("joint")
        return loss(outputs, labels, targets, state.weight).to(state.weight)

    def absorb(self, state: JointState, x_new: Tensor, seen: Seen) -> Tensor:
        ball = self.setting.ball
        mean = seen.grad.abs().flatten(1).mean(dim=1).clamp_min(torch.finfo(seen.grad.dtype).tiny)
        state.momentum.mul_(MOMENTUM).add_(seen.grad / per_image(mean, seen.grad))
        passed = state.iteration / state.n_iter.clamp(min=1)  # n_iter is 0 in a free slot
        step = 0.5 * FIRST_STEP * ball.eps * (1 + (math.pi * passed).cos())
        moved = x_new + per_image(step, x_new) * ball.steepest(state.momentum)
        state.x_adv.copy_(ball.project(moved, state.x))
        state.iteration += 1
        return state.iteration > state.n_iter


def can_win(mixed: MixedClassifier) -> Callable[[Known], Tensor]:
    """Select standing images near the border.

    Near: the margin less 2 (1 - alpha) is below 5 % of the clean margin. A change of std's class lowers the mixture's
    margin by at most 2 (1 - alpha).
    """

    def wanted(known: Known) -> Tensor:
        return known.margin - 2 * mixed.one_minus_alpha < NEAR_BORDER * known.clean_margin

    return wanted

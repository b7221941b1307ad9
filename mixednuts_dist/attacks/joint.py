"""The joint attack on the mixed classifier, for images that the surrogate's gradients leave standing.

With a one-hot std (T = 0) class k beats y where std votes for k and rob's gap is small, alpha (p_y - p_k) < 1 - alpha.
Both must hold at one point. A surrogate weighs them against each other; the loss "joint" asks for both.

Shapes: B images of C x H x W, K classes.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..mixing.classifier import MixedClassifier
from ..register import ATTACKS
from .apgd import Apgd, ApgdPhase
from .attack import Known, Phase
from .budget import AttackBudget

# (rob's weight, from the best point so far): std mostly follows by itself, how far differs between images. A run from
# the best point, where std has nearly followed, comes with a larger weight after those from a random start.
# The order is the best of seven that were tried on 50 digits at the border of one mixture: 11 broken, and 7 where 16
# came first. It was not tried on other images.
TURNS = ((64.0, False), (1024.0, True), (16.0, False), (4096.0, True), (256.0, False))
NEAR_BORDER = 0.05  # of the clean margin


@ATTACKS(
    "joint", describes="APGD on rob's gap and std's vote together; mixtures only", order=6, mixtures_only=True,
    options=("n_iter", "n_target_classes", "border_restarts"),
)  # fmt: skip
class Joint(Apgd):
    """Runs from random starts and from the best points, for images near the border, where they can still win.

    All of them together take no more passes than APGD-T. A run ends where its loss will not come to what every success
    has (`ApgdPhase.goal`): with T = 0 std's term is then 0 and rob's gap at most (1 - alpha) / alpha, so that the loss
    is at least `w log(1 - (1 - alpha) / alpha)`.
    """

    name = "joint"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        steps = (budget.n_iter + 1) * budget.n_targets(n_classes) if budget.border_restarts else 0
        return steps, steps

    def phases(self) -> Sequence[Phase]:
        setting, budget = self.setting, self.setting.budget
        if not isinstance(setting.model, MixedClassifier) or not budget.border_restarts:
            return []
        wanted = can_win(setting.model, self.passes(budget, setting.n_classes)[1] - budget.n_iter - 1)
        n_random = 0
        plan: list[Phase] = []
        for weight, from_best in TURNS:
            if not from_best and n_random == budget.border_restarts:
                break
            plan += [
                ApgdPhase(
                    self.name, "joint/{rank}", self, target=target, restart=n_random, loss="joint",
                    n_iter=budget.n_iter, from_best=from_best, first_step=1.0 if from_best else 2.0, weight=weight,
                    goal=least_loss(setting.model, weight), wanted=wanted,
                )
                for target in range(1, budget.n_targets(setting.n_classes) + 1)
            ]  # fmt: skip
            n_random += not from_best
        return plan


def least_loss(mixed: MixedClassifier, weight: float) -> float:
    """What the joint loss is at least where the target wins; -inf where nothing can be said (T > 0, alpha <= .5)."""
    if mixed.temperature > 0 or mixed.alpha <= mixed.one_minus_alpha:
        return -math.inf
    return weight * math.log1p(-mixed.one_minus_alpha / mixed.alpha)


def can_win(mixed: MixedClassifier, most_passes: int) -> Callable[[Known], Tensor]:
    """Standing images near the border that have not taken more than `most_passes` of the joint attack.

    Near means: within 5 % of the clean margin of the border had std voted against the label. Std's vote moves the
    mixture's margin by at most 2 (1 - alpha).
    """

    def wanted(known: Known) -> Tensor:
        begun = known.note("joint")
        # One more than the passes before the first run, so that 0 says: not begun.
        first = torch.where(begun[known.rows] == 0, known.n_backward + 1, begun[known.rows])
        begun[known.rows] = first
        near = known.margin - 2 * mixed.one_minus_alpha < NEAR_BORDER * known.clean_margin
        return near & (known.n_backward + 1 - first <= most_passes)

    return wanted

"""The joint attack on the mixed classifier, for images that the surrogate's gradients leave standing.

With a one-hot std (T = 0) class k beats y where std votes for k and rob's gap is small, alpha (p_y - p_k) < 1 - alpha.
Both must hold at one point. A surrogate weighs them against each other; the loss "joint" asks for both.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..mixing.classifier import MixedClassifier
from ..register import ATTACKS
from .apgd import Apgd, ApgdPhase
from .attack import Known, Phase
from .budget import AttackBudget

ROB_WEIGHTS = (16.0, 64.0, 256.0)  # one a random start: std mostly follows by itself, how far differs between images
CLOSING_WEIGHTS = (1024.0, 4096.0)  # from the best point so far, where std has nearly followed
NEAR_BORDER = 0.05  # of the clean margin


@ATTACKS(
    "joint", describes="APGD on rob's gap and std's vote together; mixtures only", order=6,
    options=("n_iter", "n_target_classes", "border_restarts"),
)  # fmt: skip
class Joint(Apgd):
    """Random starts with one weight each, then the best points so far with larger ones, for images near the border."""

    name = "joint"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        if not budget.border_restarts:
            return 0, 0
        rounds = budget.border_restarts + len(CLOSING_WEIGHTS)
        steps = (budget.n_iter + 1) * budget.n_targets(n_classes) * rounds
        return steps, steps

    def phases(self) -> Sequence[Phase]:
        setting, budget = self.setting, self.setting.budget
        if not isinstance(setting.model, MixedClassifier) or not budget.border_restarts:
            return []
        turns = [(ROB_WEIGHTS[turn % len(ROB_WEIGHTS)], turn, False) for turn in range(budget.border_restarts)]
        turns += [(weight, 0, True) for weight in CLOSING_WEIGHTS]
        return [
            ApgdPhase(
                self.name, "joint/{rank}", self, target=target, restart=restart, loss="joint", n_iter=budget.n_iter,
                from_best=from_best, first_step=1.0 if from_best else 2.0, weight=weight,
                wanted=near_border(setting.model),
            )
            for weight, restart, from_best in turns
            for target in range(1, budget.n_targets(setting.n_classes) + 1)
        ]  # fmt: skip


def near_border(mixed: MixedClassifier) -> Callable[[Known], Tensor]:
    """Standing images that would be within 5 % of their clean margin of the border had std voted against them.

    Std's vote moves the mixture's margin by at most 2 (1 - alpha).
    """

    def near(known: Known) -> Tensor:
        return known.margin - 2 * mixed.one_minus_alpha < NEAR_BORDER * known.clean_margin

    return near

"""The APGD attacks: which losses and targets the steps of `ascent.py` follow, and the float32 runs at their end."""

# ruff: noqa: ARG004 - what is registered is given more than it may need

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..config.register import ATTACKS
from ..norms.ball import ball_of
from .ascent import Apgd
from .attack import Attack, Setting
from .budget import AttackBudget
from .sparse_ascent import SparseApgd
from .stepper import ImageSummary, Run

# Float32 steps on the margin itself, from the best point that low-precision gradients found.
POLISH_ITERATIONS, POLISH_STEP = 10, 0.5
POLISH_AGAIN, POLISH_ROUNDS = 1e-2, 6  # an image whose margin fell by more is polished again, at most this often
GROUP = "apgd"  # the runs of all APGD attacks are independent of one another


def stepper_for(setting: Setting, **schedule: Any) -> Apgd:
    """Return what takes the steps in the norm of the threat model; `schedule` instead of that of the budget."""
    kind = SparseApgd if ball_of(setting.threat).sparse else Apgd
    return kind(setting.threat, setting.seed, **schedule or {"n_iter": setting.budget.n_iter})


@ATTACKS("apgd-ce", describes="APGD on cross-entropy", options=("n_iter", "n_restarts"), order=1)
class ApgdCe(Attack):
    """APGD on the cross-entropy of the label, from `n_restarts` random starts; a subclass names another loss."""

    name = "apgd-ce"
    climbs_to_the_end = True
    loss: ClassVar[str] = "ce"  # registered

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        steps = (budget.n_iter + 1) * budget.n_restarts
        return steps, steps

    def runs(self) -> Sequence[Run]:
        stepper, restarts = stepper_for(self.setting), range(self.setting.budget.n_restarts)
        return [Run(self.name, self.name, stepper, restart=i, group=GROUP, loss=self.loss) for i in restarts]


@ATTACKS("apgd-dlr", describes="APGD on the untargeted DLR loss", options=("n_iter", "n_restarts"), order=8)
class ApgdDlr(ApgdCe):
    """APGD on the difference of logits ratio, AutoAttack's in its versions `plus` and `rand`."""

    name = "apgd-dlr"
    loss = "untargeted-dlr"


@ATTACKS("apgd-t", describes="APGD on the targeted DLR loss", options=("n_iter", "n_target_classes"), order=2)
class ApgdT(Attack):
    """APGD on the targeted DLR loss, one run per target."""

    name = "apgd-t"
    climbs_to_the_end = True
    followed_by = ("joint",)

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        steps = (budget.n_iter + 1) * budget.n_targets(n_classes)
        return steps, steps

    def runs(self) -> Sequence[Run]:
        stepper = stepper_for(self.setting)
        targets = range(1, self.setting.budget.n_targets(self.setting.n_classes) + 1)
        return [Run(self.name, "apgd-t/{rank}", stepper, target, group=GROUP, loss="dlr") for target in targets]


def float32_runs(setting: Setting, attack: str, low_precision: Sequence[Run]) -> list[Run]:
    """Return what follows runs with low-precision gradients: float32 steps, and repeats for borderline images.

    Every image that is not broken takes a few float32 steps from its best point, and further ones if they still lower
    its margin. A borderline image then repeats in float32, from the same starts, the runs that ended borderline
    themselves: the last thousandth of the margin decides whether it breaks, and low-precision gradients do not reach
    that far.
    """
    stepper = stepper_for(setting, n_iter=POLISH_ITERATIONS, first_step=POLISH_STEP)

    def still_gains(image: ImageSummary) -> bool:
        return image.gain > POLISH_AGAIN

    def came_near(image: ImageSummary) -> bool:
        return setting.is_borderline(image) and setting.is_borderline(replace(image, margin=image.repeated_margin))

    polish = Run(attack, "polish", stepper, from_best=True, loss="margin", float32=True)
    again = [replace(polish, wanted=still_gains)] * (POLISH_ROUNDS - 1)
    return [polish, *again, *(replace(run, float32=True, wanted=came_near, group="repeats") for run in low_precision)]

"""The APGD attacks: which losses and targets the steps of `ascent.py` climb, and the float32 steps at their end."""

# ruff: noqa: ARG004 - what is registered is given more than it may need

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from ..config.register import ATTACKS
from .ascent import Apgd, ApgdPhase
from .attack import NEAR, Attack, Known, Phase, Setting, decisive_margin, next_to_border
from .budget import AttackBudget
from .sparse_ascent import SparseApgd

# The margin itself, from the best point so far: what is left to gain in float32 after coarser gradients. From half a
# radius 10 iterations gain .83 to .92 of what 16 from a whole one do, in the mean of 446 standing images of three
# networks, and leave each with a smaller mean margin than float32 throughout does.
POLISH_ITERATIONS, POLISH_STEP = 10, 0.5
POLISH_AGAIN, POLISH_ROUNDS = 1e-2, 6  # whose margin fell by more is polished again, so often at most


def stepper_for(setting: Setting) -> Apgd:
    """What takes the steps in the norm of the threat model."""
    return SparseApgd(setting) if setting.ball.sparse else Apgd(setting)


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

    def phases(self) -> Sequence[Phase]:
        budget, stepper = self.setting.budget, stepper_for(self.setting)
        return [
            ApgdPhase(
                self.name, self.name, stepper, restart=restart, beside=restart > 0, loss=self.loss, n_iter=budget.n_iter
            )
            for restart in range(budget.n_restarts)
        ]


@ATTACKS("apgd-dlr", describes="APGD on the untargeted DLR loss", options=("n_iter", "n_restarts"), order=8)
class ApgdDlr(ApgdCe):
    """APGD on the difference of logits ratio, AutoAttack's in its versions `plus` and `rand`."""

    name = "apgd-dlr"
    loss = "untargeted-dlr"


@ATTACKS("apgd-t", describes="APGD on the targeted DLR loss", options=("n_iter", "n_target_classes"), order=2)
class ApgdT(Attack):
    """APGD on the targeted DLR loss, one run a target."""

    name = "apgd-t"
    climbs_to_the_end = True
    followed_by = ("joint",)

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        steps = (budget.n_iter + 1) * budget.n_targets(n_classes)
        return steps, steps

    def phases(self) -> Sequence[Phase]:
        budget, stepper = self.setting.budget, stepper_for(self.setting)
        return [
            ApgdPhase(self.name, "apgd-t/{rank}", stepper, target=target, beside=True, loss="dlr", n_iter=budget.n_iter)
            for target in range(1, budget.n_targets(self.setting.n_classes) + 1)
        ]


def float32_phases(setting: Setting, attack: str, coarse: Sequence[Phase]) -> list[Phase]:
    """What follows phases with coarse gradients: float32 steps for all standing images, and more next to the border.

    Every standing image takes a few steps from its best point, and further ones where they still lower its margin. An
    image next to the border then repeats in float32, from the same starts, those phases that by themselves came near
    the border: whether it breaks is decided by the last thousandth of its margin, which coarse gradients do not reach.
    """
    stepper = stepper_for(setting)

    def still_helps(known: Known) -> Tensor:
        return known.gained > POLISH_AGAIN

    def came_near(known: Known) -> Tensor:
        # The best of them did, whatever the float32 steps had to add.
        came = known.margin + known.behind < NEAR * decisive_margin(known, setting)
        return came & (known.margin >= 0) & next_to_border(known, setting)

    polish: list[Phase] = [
        ApgdPhase(
            attack, "polish", stepper, in_float32=True, wanted=still_helps if turn else None,
            loss="margin", n_iter=POLISH_ITERATIONS, from_best=True, first_step=POLISH_STEP,
        )
        for turn in range(POLISH_ROUNDS)
    ]  # fmt: skip
    again = [
        replace(phase, stepper=stepper, in_float32=True, wanted=came_near, beside=bool(i))  # so few images
        for i, phase in enumerate(coarse)
    ]
    return [*polish, *again]

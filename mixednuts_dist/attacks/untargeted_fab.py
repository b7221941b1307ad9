"""Untargeted FAB (Croce & Hein 2020): towards whichever class is nearest by the linearization at the iterate.

At an iterate the hyperplanes between the label y and each other class k are

    { z : f_k(x_i) + <w_k, z - x_i> = 0 },    f_k = logit_k - logit_y,    w_k = gradient of f_k at x_i,

and the step is the one of `fab.py` for the k with the smallest distance |f_k(x_i)| / ||w_k||, in the dual norm.

An image linearizes at its point in K - 1 passes, one per class. The first of them also shows whether the iterate has
crossed the boundary: then the image is pulled back and begins again there. So an iterate takes K - 1 passes, or K if it
crosses, and every pass has a gradient.

Shapes: S slots, images of C x H x W, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..norms.ball import per_image
from .attack import Attack, with_float32_repeats
from .budget import AttackBudget
from .fab import PULL_BACK, difference, next_iterate
from .gradient_model import Outputs
from .stepper import Counts, Flags, Images, Numbers, Run, SlotState, StartBatch, Stepper, StepResult, copy_rows, sent

_TINY = 1e-12  # added to the length of a gradient, as published
_START = 0.5  # share of the radius at which restarts begin

DUAL_ORDER = {"Linf": 1, "L2": 2, "L1": torch.inf}  # by norm: the order of the dual norm, which measures gradients


@dataclass
class UntargetedFabState(SlotState):
    """Untargeted FAB's state of each slot."""

    x: Images  # clean image
    x_now: Images  # the iterate, or the point pulled back from it
    grad: Images  # gradient of the nearest class so far
    value: Numbers  # its f_k
    distance: Numbers
    number: Counts  # next other class, 0 .. K - 2
    checking: Flags  # the point is an iterate that no pass has seen
    left: Counts  # iterates to check


@dataclass(frozen=True)
class UntargetedFabSteps(Stepper[UntargetedFabState]):
    """Each pass linearizes at the slot's point with respect to one other class."""

    n_iter: int = 100
    stays_inside: ClassVar[bool] = False  # it looks for the border, wherever that is

    def init(self, like_SCHW: Tensor) -> UntargetedFabState:
        return UntargetedFabState.of(like_SCHW)

    def start(self, state: UntargetedFabState, slots: Tensor, batch: StartBatch) -> None:
        """Begin at the clean image or, in further restarts, at a random point, which is linearized first."""
        start = batch.random_start(type(self.ball)(_START * self.ball.eps), self.seed)
        copy_rows(start, batch.x, sent([not run.restart for run in batch.runs], slots).bool())
        state.x[slots], state.x_now[slots] = batch.x, start
        state.number[slots], state.checking[slots] = 0, False
        state.distance[slots], state.left[slots] = torch.inf, self.n_iter

    def ask(self, state: UntargetedFabState) -> Tensor:
        return state.x_now

    def loss(self, state: UntargetedFabState, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """Return f_k of the next class, (S,), from the surrogate of a mixed classifier."""
        return difference(outputs.logits, labels, _other_class(state.number, labels))

    def tell(self, state: UntargetedFabState, x: Tensor, result: StepResult) -> Tensor:
        """Keep the nearest class, step after the last class, and pull back iterates that have crossed."""
        crossed = state.checking & result.wrong
        state.left -= state.checking.long()
        state.checking = torch.zeros_like(crossed)
        # As in FAB-T, a mixed classifier's value is its own and its gradient the surrogate's.
        value = difference(result.logits, result.labels, _other_class(state.number, result.labels)).to(state.value)
        distance = value.abs() / (_TINY + result.grad.flatten(1).norm(DUAL_ORDER[self.threat.norm], dim=1))
        nearer = (distance < state.distance) & ~crossed
        copy_rows(state.grad, result.grad, nearer)
        state.value = torch.where(nearer, value, state.value)
        state.distance = torch.where(nearer, distance, state.distance)
        state.number += (~crossed).long()
        complete = state.number >= result.logits.shape[1] - 1
        # On a CPU only rows that step; an accelerator would have to wait for their numbers.
        rows = complete.nonzero().squeeze(1) if complete.device.type == "cpu" else torch.arange(len(complete))
        if len(rows):
            clean, x_now, value_S, grad = (each[rows] for each in (state.x, x, state.value, state.grad))
            stepped = next_iterate(clean, x_now, value_S, grad, self.threat)
            state.x_now[rows] = torch.where(per_image(complete[rows], stepped), stepped, x_now)
        copy_rows(state.x_now, torch.lerp(state.x, x, PULL_BACK), crossed)
        state.number = torch.where(complete, 0, state.number)
        state.distance = torch.where(complete, torch.inf, state.distance)
        state.checking = complete
        return state.left <= 0


@ATTACKS(
    "fab", describes="FAB towards the nearest class", options=("n_iter", "n_restarts"),
    norms=("Linf", "L2", "L1"), order=9,
)  # fmt: skip
class UntargetedFab(Attack):
    """FAB from the clean image, and for each further restart from a random point in half of the ball."""

    name = "fab"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        """Return the passes of an image that crosses the boundary with each iterate."""
        steps = budget.n_iter * n_classes * budget.n_restarts
        return steps, steps

    def runs(self) -> Sequence[Run]:
        """Return one run per restart."""
        setting = self.setting
        stepper = UntargetedFabSteps(setting.threat, setting.seed, n_iter=setting.budget.n_iter)
        restarts = range(setting.budget.n_restarts)
        runs = [Run(self.name, self.name, stepper, restart=restart, group=self.name) for restart in restarts]
        return with_float32_repeats(runs, setting)


def _other_class(number_S: Tensor, labels_S: Tensor) -> Tensor:
    """The classes but the label, counted from 0."""
    return number_S + (number_S >= labels_S).long()

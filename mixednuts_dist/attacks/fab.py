"""FAB (Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive boundary attack").

FAB looks for the nearest image of another class. At an iterate x_i it linearizes the classifier, so that the decision
boundary between the label y and another class k becomes the hyperplane

    { z : f_k(x_i) + <w_k, z - x_i> = 0 },    f_k = logit_k - logit_y,    w_k = gradient of f_k at x_i,

projects both the iterate and the clean image x onto that plane within the box [0, 1], and steps (with overshoot) to a
weighted mean of the two projections. After each iterate in another class, FAB goes a tenth of the way back to x. FAB-T
has one target k; untargeted FAB chooses at each iterate the k with the smallest distance |f_k(x_i)| / ||w_k||, in the
dual norm.

Shapes: S slots, B images of C x H x W with D pixels, K classes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..config.threat import ThreatModel
from ..mixing.margins import at
from ..norms.ball import ball_of, per_image
from .attack import Counts, Flags, Images, Numbers, Run, Setting, SlotState, StartBatch, Stepper, StepResult, copy_rows
from .gradient_model import Outputs
from .losses import anyone

OVERSHOOT = 1.05  # eta: the step is this many times as long as the way to the linearized boundary
MOST_BIAS = 0.1  # alpha_max: the largest weight of the step from the clean image
PULL_BACK = 0.9  # beta: an iterate that has crossed the boundary keeps this share of its distance to the clean image
START = 0.5  # restarts begin at this share of the radius

DUAL_ORDER = {"Linf": 1, "L2": 2, "L1": torch.inf}  # by norm: the order of the dual norm, which measures gradients
_NEWTON_STEPS = 16  # on CIFAR-10, the projection usually needs 2 to 4
_SHORTEST, _TINY = 1e-8, 1e-12  # guards divisions by the length of a step and of a gradient, as published


@dataclass
class FabState(SlotState):
    """FAB's state of each slot."""

    x_next: Images  # the point to evaluate


@dataclass(frozen=True)
class FabSteps(Stepper[FabState]):
    """Alternates two passes: one with a gradient linearizes the classifier, and the next one checks the new iterate.

    On robust networks, most iterates cross the decision boundary and are pulled back before they are linearized.
    """

    state_type = FabState
    gradient_every: ClassVar[int] = 2
    stays_inside: ClassVar[bool] = False  # the decision boundary may be outside of the ball
    repeats_in_float32: ClassVar[bool] = True

    def most_passes(self, n_classes: int) -> int:  # noqa: ARG002
        return 2 * self.n_iter

    def start(self, state: FabState, slots: Tensor, batch: StartBatch) -> None:
        state.x_next[slots] = batch.x

    def ask(self, state: FabState) -> Tensor:
        return state.x_next

    def loss(self, state: FabState, outputs: Outputs) -> Tensor:
        return difference(outputs.logits, state.labels, state.targets)

    def tell(self, state: FabState, x: Tensor, result: StepResult) -> Tensor:
        """Step to the next iterate after a pass with a gradient, otherwise pull back the iterates that have crossed.

        The linearization of a mixed classifier has its value and the surrogate's gradient, as in the reference.
        """
        if len(result.grad):
            value = difference(result.logits, state.labels, state.targets)
            state.x_next = next_iterate(state.x, x, value, result.grad, self.threat)
        else:
            # With a weight of 1 lerp gives the point itself.
            state.x_next = torch.lerp(state.x, x, per_image(torch.where(result.wrong, PULL_BACK, 1.0), x))
        return state.n_passes >= 2 * self.n_iter


@dataclass
class UntargetedFabState(SlotState):
    """Untargeted FAB's state of each slot."""

    x_now: Images  # the iterate, or the point pulled back from it
    grad: Images  # gradient of the nearest class so far
    value: Numbers  # f_k of this class
    distance: Numbers  # to the boundary with this class
    number: Counts  # the next class, 0 .. K - 2, counted without the label
    checking: Flags  # whether `x_now` is a new iterate, which may have crossed the boundary
    left: Counts  # number of iterates that are not checked yet


@dataclass(frozen=True)
class UntargetedFabSteps(Stepper[UntargetedFabState]):
    """Each pass linearizes at the slot's point with respect to one other class.

    The first of the K - 1 passes also shows whether the iterate has crossed the decision boundary. If it has, it is
    pulled back, and its K - 1 passes begin again there. So an iterate takes K - 1 passes, or K if it crosses.
    """

    state_type = UntargetedFabState
    stays_inside: ClassVar[bool] = False  # the decision boundary may be outside of the ball
    repeats_in_float32: ClassVar[bool] = True

    def most_passes(self, n_classes: int) -> int:
        return self.n_iter * n_classes

    def start(self, state: UntargetedFabState, slots: Tensor, batch: StartBatch) -> None:
        """Begin at the clean image or, in further restarts, at a random point."""
        start = type(self.ball)(START * self.ball.eps).random_start(batch.x, batch.keys)
        copy_rows(start, batch.x, batch.each(lambda run: not run.restart, slots).bool())
        state.x_now[slots] = start
        state.number[slots], state.checking[slots] = 0, False
        state.distance[slots], state.left[slots] = torch.inf, self.n_iter

    def ask(self, state: UntargetedFabState) -> Tensor:
        return state.x_now

    def loss(self, state: UntargetedFabState, outputs: Outputs) -> Tensor:
        return difference(outputs.logits, state.labels, _other_class(state.number, state.labels))

    def tell(self, state: UntargetedFabState, x: Tensor, result: StepResult) -> Tensor:
        """Keep the nearest class, step after the last class, and pull back iterates that have crossed."""
        crossed = state.checking & result.wrong
        state.left -= state.checking.long()
        state.checking = torch.zeros_like(crossed)
        value = difference(result.logits, state.labels, _other_class(state.number, state.labels)).to(state.value)
        distance = value.abs() / (_TINY + result.grad.flatten(1).norm(DUAL_ORDER[self.threat.norm], dim=1))
        nearer = (distance < state.distance) & ~crossed
        copy_rows(state.grad, result.grad, nearer)
        state.value = torch.where(nearer, value, state.value)
        state.distance = torch.where(nearer, distance, state.distance)
        state.number += (~crossed).long()
        complete = state.number >= result.logits.shape[1] - 1
        if anyone(complete):
            copy_rows(state.x_now, next_iterate(state.x, x, state.value, state.grad, self.threat), complete)
        copy_rows(state.x_now, torch.lerp(state.x, x, PULL_BACK), crossed)
        state.number = torch.where(complete, 0, state.number)
        state.distance = torch.where(complete, torch.inf, state.distance)
        state.checking = complete
        return state.left <= 0


def difference(logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """Return the target's logit minus the label's, (B,); negative on the label's side of their decision boundary."""
    return at(logits_BK, targets_B) - at(logits_BK, labels_B)


def next_iterate(x: Tensor, x_now: Tensor, difference: Tensor, grad: Tensor, threat: ThreatModel) -> Tensor:
    """Return equation 9 of the paper: a weighted mean of the projections, with overshoot, of iterate and clean image.

    The weight of the clean image's projection is |d_now| / (|d_now| + |d_x|), at most `MOST_BIAS`. It is small if the
    iterate is close to the decision boundary.
    """
    w_BD = grad.flatten(1)
    # The plane's offset, w z - b, is `difference` at the iterate, and differs from it by w (x - x_now) at the image.
    offset_B = difference + (w_BD * (x - x_now).flatten(1)).sum(dim=1)
    d_now = project_on_plane(x_now.flatten(1), w_BD, difference, threat.norm).view_as(x)
    d_clean = project_on_plane(x.flatten(1), w_BD, offset_B, threat.norm).view_as(x)
    now_B, clean_B = (ball_of(threat).length(d).clamp(min=_SHORTEST) for d in (d_now, d_clean))
    bias = per_image((now_B / (now_B + clean_B)).clamp(max=MOST_BIAS), x)
    near_now, near_clean = torch.add(x_now, d_now, alpha=OVERSHOOT), torch.add(x, d_clean, alpha=OVERSHOOT)
    return torch.lerp(near_now, near_clean, bias).clamp_(0.0, 1.0)


def project_on_plane(t_BD: Tensor, w_BD: Tensor, offset_B: Tensor, norm: str) -> Tensor:
    """Return the smallest d in the norm with <w, t + d> = b and t + d in [0, 1], for `offset` = <w, t> - b; (B, D).

    If the plane does not meet the box [0, 1], t + d is the corner of the box that is nearest to the plane.

    Let offset >= 0 (otherwise, swap the signs of w and b). Then <w, d> has to fall to -offset, so only moves against w
    help: pixel j moves by -sign(w_j) m_j with 0 <= m_j <= room_j, its distance to the side of the box. The smallest m
    with <|w|, m> = offset is min(lam, room) in Linf, where all pixels move together. In L2, it is min(lam |w|, room),
    where the Lagrangian |m|^2 / 2 - lam (<|w|, m> - offset) is stationary. In L1, one pixel moves after another.
    """
    # Masks are factors of 0 and 1, because `torch.where` takes several times as long on a CPU.
    # The direction in which each pixel moves; 0 if its w is 0.
    sign_BD = w_BD.sign().mul_(torch.where(offset_B >= 0, -1.0, 1.0)[:, None])
    room_BD = (sign_BD * 0.5).add_(0.5).sub_(t_BD).mul_(sign_BD)  # 1 - t or t
    weight_BD, offset_B1 = w_BD.abs(), offset_B.abs()[:, None]
    if norm == "L1":
        return sign_BD.mul_(_one_by_one(weight_BD, room_BD, offset_B1))
    speed_BD = weight_BD if norm == "L2" else torch.ones_like(weight_BD)
    arrives_BD = room_BD / speed_BD.clamp(min=1e-30)  # the lam at which a pixel reaches the side of the box
    lam_B1 = _root(weight_BD * speed_BD * (arrives_BD > 0), arrives_BD, offset_B1)
    return sign_BD.mul_(torch.minimum(speed_BD * lam_B1, room_BD))


def _one_by_one(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """Return the m that moves one pixel after another to its limit, in the order of falling weights."""
    falling_BD, order_BD = weight_BD.sort(dim=1, descending=True)
    room_in_order_BD = room_BD.gather(1, order_BD)
    gained_BD = (falling_BD * room_in_order_BD).cumsum(dim=1)
    before_BD = torch.cat([torch.zeros_like(offset_B1), gained_BD[:, :-1]], dim=1)
    moves_BD = ((offset_B1 - before_BD) / falling_BD.clamp(min=1e-30)).clamp(min=0)
    return torch.zeros_like(room_BD).scatter(1, order_BD, torch.minimum(moves_BD, room_in_order_BD))


def _root(gain_BD: Tensor, limit_BD: Tensor, target_B1: Tensor) -> Tensor:
    """Return the lam, (B, 1), with g(lam) = sum_j gain_j min(lam, limit_j) = target, or the largest number.

    g is concave, increasing and piecewise linear. Newton's method from lam = 0 never overshoots, because each tangent
    lies above g. It is exact on the right linear segment and, unlike the published bisection, sorts nothing. Pixels
    with lam > limit_j contribute constants, and the gains of the other pixels, the free ones, sum to the slope of g.
    So the next lam is (target - sum of the constants) / (sum of the free gains).
    """
    missed = torch.finfo(limit_BD.dtype).max  # and not infinity, which times a weight of 0 is not a number
    every_B1 = gain_BD.sum(dim=1, keepdim=True)
    lam_B1 = torch.where(every_B1 > 0, target_B1 / every_B1, 0)  # all are free
    filled_BD, scratch_BD = gain_BD * limit_BD, torch.empty_like(gain_BD)
    for _ in range(_NEWTON_STEPS):
        free_B1 = torch.ge(limit_BD, lam_B1, out=scratch_BD).mul_(gain_BD).sum(dim=1, keepdim=True)
        arrived_B1 = torch.lt(limit_BD, lam_B1, out=scratch_BD).mul_(filled_BD).sum(dim=1, keepdim=True)
        further_B1 = torch.where(free_B1 > 0, (target_B1 - arrived_B1) / free_B1, missed)
        moved_B1 = further_B1 > lam_B1
        lam_B1 = torch.where(moved_B1, further_B1, lam_B1)
        if not anyone(moved_B1):
            break
    return lam_B1


def _other_class(number_S: Tensor, labels_S: Tensor) -> Tensor:
    """Return the class with this number, if classes are counted from 0 without the label."""
    return number_S + (number_S >= labels_S).long()


@ATTACKS("fab-t", options=("n_iter", "n_target_classes"), norms=("Linf", "L2", "L1"), order=3)
def fab_t(setting: Setting) -> list[Run]:
    """FAB toward one class after another, from the clean image."""
    stepper = FabSteps(setting.threat, setting.budget.n_iter)
    return [Run("fab-t", stepper, target, block="fab-t") for target in setting.targets]


@ATTACKS("fab", options=("n_iter", "n_restarts"), norms=("Linf", "L2", "L1"), order=9)
def untargeted_fab(setting: Setting) -> list[Run]:
    """FAB toward the nearest class, from the clean image and then from random points in half of the ball."""
    stepper = UntargetedFabSteps(setting.threat, setting.budget.n_iter)
    return [Run("fab", stepper, restart=i, block="fab") for i in range(setting.budget.n_restarts)]

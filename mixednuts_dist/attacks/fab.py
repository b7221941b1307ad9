"""FAB-T (Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive boundary attack").

FAB looks for the nearest image of another class. At an iterate x_i it replaces the classifier by its linearization, so
that the border between the label y and the target k becomes the hyperplane

    { z : f(x_i) + <w, z - x_i> = 0 },    f = logit_k - logit_y,    w = gradient of f at x_i,

projects both the iterate and the clean image x onto that plane within the box [0, 1], and steps (with overshoot) to a
mean of the two. Whenever it has crossed into another class it goes a tenth of the way back to x.

One iterate takes a forward pass that shows whether it has crossed, and a pass forward and backward that linearizes: at
the iterate itself or, if it had crossed, at the point pulled back. These two kinds of pass alternate. An iterate that
has not crossed could be linearized by its first pass, but on robust networks 70% to 80% of the iterates cross, and a
backward pass that is thrown away costs more than the forward passes saved.

Shapes: S slots, images of C x H x W, K classes; B rows of D = C H W pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..config.threat import ThreatModel
from ..norms.ball import ball_of, per_image
from .attack import Attack, with_float32_repeats
from .budget import AttackBudget
from .gradient_model import Outputs
from .losses import anyone, at
from .stepper import Counts, Images, Run, SlotState, StartBatch, Stepper, StepResult

OVERSHOOT = 1.05  # eta: the step is this much longer than to the linearized border
MOST_BIAS = 0.1  # alpha_max: the largest weight of the step from the clean image
PULL_BACK = 0.9  # beta: what is left of the way from the clean image after crossing the border

_SHORTEST = 1e-8  # guards the ratio of two step lengths, as published
# Steps of the projection. On CIFAR-10, 2 to 4 are usually enough. A CPU stops as soon as no root moves; an accelerator
# would have to wait for that answer.
_NEWTON_STEPS, _STEPS_WITHOUT_ASKING = 30, 16
_ROWS_ON_CPU = 32  # the arrays of this many images stay in the cache


@dataclass
class FabState(SlotState):
    """FAB's state of each slot."""

    x: Images  # clean image
    x_next: Images  # the point to evaluate
    left: Counts  # iterates to check


@dataclass(frozen=True)
class FabSteps(Stepper[FabState]):
    """A pass with a gradient linearizes the classifier; the one after it checks whether the iterate has crossed."""

    n_iter: int = 100
    gradient_every: ClassVar[int] = 2
    stays_inside: ClassVar[bool] = False  # it looks for the border, wherever that is

    def init(self, like_SCHW: Tensor) -> FabState:
        return FabState.of(like_SCHW)

    def start(self, state: FabState, slots: Tensor, batch: StartBatch) -> None:
        """Begin at the clean image, which is linearized first."""
        state.x[slots] = state.x_next[slots] = batch.x
        state.left[slots] = self.n_iter

    def ask(self, state: FabState) -> Tensor:
        return state.x_next

    def loss(self, state: FabState, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the logit of the target minus that of the label, (S,), from the surrogate of a mixed classifier."""
        return difference(outputs.logits, labels, targets)

    def tell(self, state: FabState, x: Tensor, result: StepResult) -> Tensor:
        """Step to the next iterate after a pass with a gradient, otherwise pull back the iterates that have crossed.

        The linearization of a mixed classifier has its value and the surrogate's gradient, as in the reference.
        """
        if result.has_gradient:
            value = difference(result.logits, result.labels, result.targets)
            state.x_next = next_iterate(state.x, x, value, result.grad, self.threat)
        else:
            # With a weight of 1 lerp gives the point itself.
            state.x_next = torch.lerp(state.x, x, per_image(torch.where(result.wrong, PULL_BACK, 1.0), x))
            state.left -= 1
        return state.left <= 0


@ATTACKS(
    "fab-t", describes="FAB towards one class after the other", options=("n_iter", "n_target_classes"),
    norms=("Linf", "L2", "L1"), order=3,
)  # fmt: skip
class Fab(Attack):
    """Targeted FAB with AutoAttack's single restart, which begins at the clean image."""

    name = "fab-t"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        """Two forward and one backward for each iterate."""
        n_iterates = budget.n_iter * budget.n_targets(n_classes)
        return 2 * n_iterates, n_iterates

    def runs(self) -> Sequence[Run]:
        """Return one run per target; iterates are so close to the decision boundary that bfloat16 is too coarse."""
        setting, budget = self.setting, self.setting.budget
        stepper = FabSteps(setting.threat, setting.seed, n_iter=budget.n_iter)
        targets = range(1, budget.n_targets(setting.n_classes) + 1)
        runs = [Run(self.name, f"{self.name}/{{rank}}", stepper, target, group=self.name) for target in targets]
        return with_float32_repeats(runs, setting)


def difference(logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor) -> Tensor:
    """The target's logit minus the label's, (B,): negative on the label's side of the border between the two."""
    return at(logits_BK, targets_B) - at(logits_BK, labels_B)


def next_iterate(x: Tensor, x_now: Tensor, difference: Tensor, grad: Tensor, threat: ThreatModel) -> Tensor:
    """Equation 9 of the paper: a mean of the overshooting projections of the iterate and of the clean image.

    The weight of the clean image's projection is |d_now| / (|d_now| + |d_x|), at most `MOST_BIAS`: the nearer the
    iterate is to the border, the less it is drawn towards x.
    """
    n = _ROWS_ON_CPU if x.device.type == "cpu" else len(x)
    parts = [slice(first, first + n) for first in range(0, len(x), n)]
    return torch.cat([_next_iterate(x[i], x_now[i], difference[i], grad[i], threat) for i in parts])


def _next_iterate(x: Tensor, x_now: Tensor, difference: Tensor, grad: Tensor, threat: ThreatModel) -> Tensor:
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
    """The smallest d, in the norm, with <w, t + d> = b and t + d in [0, 1], given `offset` = <w, t> - b; (B, D).

    Where the plane misses the box: the corner that comes nearest to it.

    Let offset >= 0 (else swap the signs of w and b). Then <w, d> has to fall to -offset, and only moves against w help:
    pixel j moves by -sign(w_j) m_j with 0 <= m_j <= room_j, its way to the box's side. `MOVES` has the smallest m of
    each norm.
    """
    # Masks are factors of 0 and 1: on a CPU choosing by them takes several times as long.
    # The way that pixels move; 0 where w is 0.
    sign_BD = w_BD.sign().mul_(torch.where(offset_B >= 0, -1.0, 1.0)[:, None])
    room_BD = (sign_BD * 0.5).add_(0.5).sub_(t_BD).mul_(sign_BD)  # 1 - t or t
    weight_BD = w_BD.abs()
    return sign_BD.mul_(MOVES[norm](weight_BD, room_BD, offset_B.abs()[:, None]))


def moves_in_linf(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """The m, (B, D), with sum_j weight_j m_j = offset and 0 <= m <= room whose largest entry is smallest.

    All that may move by lam in this norm does: m_j = min(lam, room_j), where lam solves

        g(lam) = sum_j weight_j min(lam, room_j) = offset.
    """
    return torch.minimum(_root(weight_BD * (room_BD > 0), room_BD, offset_B1), room_BD)


def moves_in_l2(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """The m, (B, D), with sum_j weight_j m_j = offset and 0 <= m <= room whose sum of squares is smallest.

    The Lagrangian |m|^2 / 2 - lam (<weight, m> - offset) is stationary at m = lam weight, cut at its box:
    m_j = min(lam weight_j, room_j), and pixel j arrives at lam = room_j / weight_j. So lam solves

        g(lam) = sum_j weight_j^2 min(lam, room_j / weight_j) = offset.
    """
    arrives_BD = room_BD / weight_BD.clamp(min=1e-30)
    lam_B1 = _root(weight_BD.square() * (arrives_BD > 0), arrives_BD, offset_B1)
    return torch.minimum(weight_BD * lam_B1, room_BD)


def moves_in_l1(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """The m, (B, D), with sum_j weight_j m_j = offset and 0 <= m <= room whose sum is smallest.

    A linear program with one constraint: pixels move one after the other, those of the largest weight first, each to
    the box's side before the next one moves, until the offset is reached.
    """
    falling_BD, order_BD = weight_BD.sort(dim=1, descending=True)
    room_in_order_BD = room_BD.gather(1, order_BD)
    gained_BD = (falling_BD * room_in_order_BD).cumsum(dim=1)
    before_BD = torch.cat([torch.zeros_like(offset_B1), gained_BD[:, :-1]], dim=1)
    moves_BD = ((offset_B1 - before_BD) / falling_BD.clamp(min=1e-30)).clamp(min=0)
    return torch.zeros_like(room_BD).scatter(1, order_BD, torch.minimum(moves_BD, room_in_order_BD))


# By norm: from |w|, the way to the box's side and the offset to how far each pixel moves.
MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Linf": moves_in_linf, "L2": moves_in_l2, "L1": moves_in_l1,
}  # fmt: skip


def _root(gain_BD: Tensor, limit_BD: Tensor, target_B1: Tensor) -> Tensor:
    """Return the lam, (B, 1), with g(lam) = sum_j gain_j min(lam, limit_j) = target, or the largest number.

    g is concave, increasing and piecewise linear. Newton's method from lam = 0 never overshoots, as each tangent lies
    above g, and is exact on the right linear segment; unlike the published bisection it sorts nothing.
    Pixels that have arrived count with gain_j limit_j, the slope is the gain of the others, the free ones:
    lam = (target - sum of arrived gain limit) / (sum of free gain).
    """
    missed = torch.finfo(limit_BD.dtype).max  # and not infinity, which times a weight of 0 is not a number
    every_B1 = gain_BD.sum(dim=1, keepdim=True)
    lam_B1 = torch.where(every_B1 > 0, target_B1 / every_B1, 0)  # all are free
    filled_BD, scratch_BD = gain_BD * limit_BD, torch.empty_like(gain_BD)
    for _ in range(_NEWTON_STEPS if gain_BD.device.type == "cpu" else _STEPS_WITHOUT_ASKING):
        free_B1 = torch.ge(limit_BD, lam_B1, out=scratch_BD).mul_(gain_BD).sum(dim=1, keepdim=True)
        arrived_B1 = torch.lt(limit_BD, lam_B1, out=scratch_BD).mul_(filled_BD).sum(dim=1, keepdim=True)
        further_B1 = torch.where(free_B1 > 0, (target_B1 - arrived_B1) / free_B1, missed)
        moved_B1 = further_B1 > lam_B1
        lam_B1 = torch.where(moved_B1, further_B1, lam_B1)
        if not anyone(moved_B1):
            break
    return lam_B1

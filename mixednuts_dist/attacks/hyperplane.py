"""Projections on hyperplanes within the box [0, 1], by norm.

Shapes: B rows of D pixels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import anyone

# Steps of the projection. On CIFAR-10, 2 to 4 are usually enough. A CPU stops as soon as no root moves; an accelerator
# would have to wait for that answer.
_NEWTON_STEPS, _STEPS_WITHOUT_ASKING = 30, 16


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

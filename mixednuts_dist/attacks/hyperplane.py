"""Projections on hyperplanes within the box [0, 1], by norm.

Shapes: B rows of D pixels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import anyone

_NEWTON_STEPS = 16  # on CIFAR-10, 2 to 4 are usually enough


def project_on_plane(t_BD: Tensor, w_BD: Tensor, offset_B: Tensor, norm: str) -> Tensor:
    """Return the smallest d in the norm with <w, t + d> = b and t + d in [0, 1], for `offset` = <w, t> - b; (B, D).

    If the plane does not meet the box [0, 1], t + d is the corner of the box that is nearest to the plane.

    Let offset >= 0 (otherwise, swap the signs of w and b). Then <w, d> has to fall to -offset, so only moves against w
    help: pixel j moves by -sign(w_j) m_j with 0 <= m_j <= room_j, its distance to the side of the box. `MOVES` computes
    the smallest m in each norm.
    """
    # Masks are factors of 0 and 1, because `torch.where` takes several times as long on a CPU.
    # The direction in which each pixel moves; 0 if its w is 0.
    sign_BD = w_BD.sign().mul_(torch.where(offset_B >= 0, -1.0, 1.0)[:, None])
    room_BD = (sign_BD * 0.5).add_(0.5).sub_(t_BD).mul_(sign_BD)  # 1 - t or t
    return sign_BD.mul_(MOVES[norm](w_BD.abs(), room_BD, offset_B.abs()[:, None]))


# Each function returns the m, (B, D), that is smallest in its norm, with sum_j weight_j m_j = offset and m <= room.


def moves_in_linf(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """Return m_j = min(lam, room_j): every pixel moves by lam, or as far as the box allows."""
    return torch.minimum(_root(weight_BD * (room_BD > 0), room_BD, offset_B1), room_BD)


def moves_in_l2(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """Return m_j = min(lam weight_j, room_j), where |m|^2 / 2 - lam (<weight, m> - offset) is stationary."""
    arrives_BD = room_BD / weight_BD.clamp(min=1e-30)  # the lam at which a pixel reaches the side of the box
    lam_B1 = _root(weight_BD.square() * (arrives_BD > 0), arrives_BD, offset_B1)
    return torch.minimum(weight_BD * lam_B1, room_BD)


def moves_in_l1(weight_BD: Tensor, room_BD: Tensor, offset_B1: Tensor) -> Tensor:
    """Return the m that moves one pixel after another to its limit, in the order of falling weights."""
    falling_BD, order_BD = weight_BD.sort(dim=1, descending=True)
    room_in_order_BD = room_BD.gather(1, order_BD)
    gained_BD = (falling_BD * room_in_order_BD).cumsum(dim=1)
    before_BD = torch.cat([torch.zeros_like(offset_B1), gained_BD[:, :-1]], dim=1)
    moves_BD = ((offset_B1 - before_BD) / falling_BD.clamp(min=1e-30)).clamp(min=0)
    return torch.zeros_like(room_BD).scatter(1, order_BD, torch.minimum(moves_BD, room_in_order_BD))


MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Linf": moves_in_linf, "L2": moves_in_l2, "L1": moves_in_l1,
}  # fmt: skip


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

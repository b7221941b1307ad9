"""L1, the sum of absolute changes: few pixels may move far.

Shapes: B images of C x H x W, D = C H W pixels.
"""

import torch
from torch import Tensor

from ..config.register import NORMS
from .ball import Ball, per_image

_STEEP_SHARE = 0.05  # share of the pixels that a step of PGD or the joint attack moves


@NORMS("L1", describes="sum of absolute changes: at most eps", order=3, usual="12 on CIFAR-10", smallest=0.1)
class L1(Ball):
    """L1 with the exact projection on the intersection of ball and box (Croce & Hein 2021).

    Example:
        >>> L1(1.0).project(torch.tensor([[[[1.5, 0.75, 0.25]]]]), torch.tensor([[[[0.5, 0.0, 0.25]]]])).tolist()
        [[[[1.0, 0.5, 0.25]]]]
    """

    sparse = True
    rounding = 1e-5  # the pixels' roundings add up

    def length(self, delta_BCHW: Tensor) -> Tensor:
        """Return the sum of absolute values, (B,)."""
        return delta_BCHW.flatten(1).abs().sum(dim=1)

    def steepest(self, grad_BCHW: Tensor) -> Tensor:
        """Return the direction that moves the 5% of the pixels with the largest gradients.

        The best direction of length 1 moves only one pixel, which soon reaches 0 or 1.
        """
        return sparse_signs(grad_BCHW, grad_BCHW.new_full((len(grad_BCHW),), _STEEP_SHARE))

    def project(self, x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
        """Return the nearest point of the intersection of ball and box."""
        return project_on_l1(x_adv_BCHW, x_BCHW, self.eps)

    def random_start(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Return the image plus normally distributed noise, projected."""
        return self.project(x_BCHW + self.noise(keys_B, x_BCHW.shape[1:]).to(x_BCHW), x_BCHW)


def project_on_l1(x_adv_BCHW: Tensor, x_BCHW: Tensor, eps: float | Tensor) -> Tensor:
    """Return the nearest point of the intersection of box and ball, whose radius is a number or, per image, (B, 1).

    `x_adv` moves pixel j by a_j = |x_adv_j - x_j|, and the box allows a move of r_j <= a_j. The Lagrangian of
    min sum (a_j - m_j)^2 with 0 <= m_j <= r_j and sum m_j <= eps gives

        m_j = clamp(a_j - lam, 0, r_j),    lam = 0 or the root of g(lam) = sum_j m_j = eps.

    g is piecewise linear: pixel j begins to shrink at lam = a_j - r_j and is at 0 from lam = a_j on.
    """
    delta_BD = (x_adv_BCHW - x_BCHW).flatten(1)
    x_BD = x_BCHW.flatten(1)
    a_BD = delta_BD.abs()
    r_BD = torch.minimum(a_BD, torch.where(delta_BD > 0, 1 - x_BD, x_BD))
    m_BD = torch.minimum((a_BD - _root(a_BD, r_BD, eps)).clamp(min=0), r_BD)
    # As published, in this order of operations: its rounding may change pixels that should not move, and APGD counts
    # changed pixels.
    back_BD = delta_BD.sign() * (m_BD - a_BD)
    return (x_BCHW + delta_BD.view_as(x_BCHW) + back_BD.view_as(x_BCHW)).clamp(0.0, 1.0)


def _root(a_BD: Tensor, r_BD: Tensor, eps: float | Tensor) -> Tensor:
    """Return the lam of `project_on_l1`, (B, 1).

    The corners of g are all a_j - r_j and all a_j. Between two corners, the slope of g is minus the number of pixels
    that shrink there, so g at each corner is a cumulative sum. This sum loses digits, so lam is computed from the
    pixels of the segment with the root.
    """
    n_pixels = a_BD.shape[1]
    corner_BE, order_BE = torch.cat([a_BD - r_BD, a_BD], dim=1).sort(dim=1)
    n_shrinking_BE = torch.where(order_BE < n_pixels, 1.0, -1.0).to(a_BD).cumsum(dim=1)
    falls_BE = n_shrinking_BE[:, :-1] * corner_BE.diff(dim=1)
    total_B1 = r_BD.sum(dim=1, keepdim=True)
    # Find the last corner at which g is still above eps; before the first corner, g is the sum of r.
    above_BE = total_B1 - falls_BE.cumsum(dim=1) > eps
    piece_B1 = above_BE.sum(dim=1, keepdim=True)
    low_B1 = corner_BE.gather(1, piece_B1)
    full_BD = a_BD - r_BD > low_B1
    shrinks_BD = ~full_BD & (a_BD > low_B1)
    kept_B1 = (torch.where(full_BD, r_BD, 0) + torch.where(shrinks_BD, a_BD, 0)).sum(dim=1, keepdim=True)
    lam_B1 = (kept_B1 - eps) / shrinks_BD.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(total_B1 > eps, lam_B1.clamp(min=0), 0)


def sparse_signs(grad_BCHW: Tensor, share_B: Tensor) -> Tensor:
    """Return the direction of L1 norm 1 that moves a share of the pixels, those with the largest gradients, equally."""
    size_BD = grad_BCHW.abs().flatten(1)
    n_pixels = size_BD.shape[1]
    rank_B = ((1 - share_B) * n_pixels).clamp(0, n_pixels - 1).long()
    least_B = size_BD.sort(dim=1).values.gather(1, rank_B[:, None]).squeeze(1)
    signs_BCHW = grad_BCHW.sign() * (grad_BCHW.abs() >= per_image(least_B, grad_BCHW))
    return signs_BCHW / (per_image(signs_BCHW.abs().flatten(1).sum(dim=1), grad_BCHW) + 1e-10)

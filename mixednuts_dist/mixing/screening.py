"""Which images can matter for any cutoff or count: bounds on every margin at a tenth of the cost of the margins.

Algorithm 1 needs a few order statistics of the attacked margins and, for every other image, only on which side of them
it lies. The sum over the other classes is bounded from a few ranks of each sorted row: the classes between two ranks
lie between them. Images whose bounds leave no doubt keep a bound for a margin; all others are measured exactly. The
outcome, cutoffs and counts, is the same as with every margin exact.

Shapes: N images, P powers, S scales, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .exp_sums import weighted_exp_sums
from .ordering import sort_rows
from .selection_kernel import Duels, SignedPowers, Slab, Standing, log_one_minus_gaps, row_blocks

_FEW_CLASSES = 48  # rows shorter than this are measured at once
_SINGLE_RANKS, _GROUP_GROWTH = 4, 2.0  # the classes behind the first ones are bounded in groups of growing size
_GELU_DIP = (-0.7517915246935645, -0.1699712075)  # where GELU turns, and a number just below its value there
_SLACK = 1e-9  # relative, far above the rounding of the bounds
_LARGEST = 600.0  # exp of it is finite; odds beyond it are bounded by 0 from below


def decisive_log_gaps(duels: Duels, slab: Slab, *, n_attacked: int, kept: Sequence[int]) -> Tensor:
    """`log(1 - gap)`, shape (P, S, N), exact for every row that a cutoff or a count at a cutoff depends on.

    The first `n_attacked` rows set the cutoffs: the k-th largest margin for each k of `kept`. Every other entry is a
    bound on the right side of all cutoffs of its candidate.
    """
    if duels.descending_NK.shape[1] < _FEW_CLASSES:
        return log_one_minus_gaps(duels, slab)
    bounds = _bound_odds(duels, slab)
    open_N = bounds.undecided(n_attacked, kept)
    gaps_PSN = bounds.low.reciprocal_().log1p_().neg_()
    gaps_PSN[..., open_N] = log_one_minus_gaps(duels.select(open_N), slab)
    return gaps_PSN


@dataclass(frozen=True)
class _OddsBounds:
    """Bounds on `(1 - m) / m`, shape (P, S, N): like log(1 - m) it falls as the margin m grows; infinite for m <= 0."""

    low: Tensor
    high: Tensor

    def undecided(self, n_attacked: int, kept: Sequence[int]) -> Tensor:
        """Rows that may lie at or across a cutoff of any candidate, and rows whose winner may lose; shape (N,)."""
        last = [k - 1 for k in kept]
        cutoff_low_PSk = sort_rows(self.low[..., :n_attacked])[..., last]
        cutoff_high_PSk = sort_rows(self.high[..., :n_attacked])[..., last]
        open_PSN = ~self.high.isfinite()
        for i in range(len(kept)):
            open_PSN |= (self.high >= cutoff_low_PSk[..., i, None]) & (self.low <= cutoff_high_PSk[..., i, None])
        return open_PSN.flatten(0, 1).any(dim=0)


def _bound_odds(duels: Duels, slab: Slab) -> _OddsBounds:
    standing = Standing.of(duels, slab)
    low_PSN, high_PSN = _bound_rests(duels, slab, standing.best)
    scales_S1 = low_PSN.new_tensor(slab.scales)[:, None]
    lead_PSN, behind_PSN = scales_S1 * standing.lead[:, None], scales_S1 * standing.behind[:, None]
    exp_behind_PSN = behind_PSN.exp_() if bool(standing.behind.any()) else behind_PSN.new_ones(())
    difference_PSN = _exp_difference(lead_PSN, standing, scales_S1, exp_behind_PSN)
    lost_PSN = ~(difference_PSN > 0)
    low_PSN.add_(exp_behind_PSN).div_(difference_PSN).mul_(1 - _SLACK).masked_fill_(lead_PSN > _LARGEST, 0)
    high_PSN.add_(exp_behind_PSN).div_(difference_PSN).mul_(1 + _SLACK)
    return _OddsBounds(low_PSN.masked_fill_(lost_PSN, torch.inf), high_PSN.masked_fill_(lost_PSN, torch.inf))


def _exp_difference(lead_PSN: Tensor, standing: Standing, scales_S1: Tensor, exp_behind_PSN: Tensor) -> Tensor:
    """`exp(lead) - exp(behind)` without cancellation, the lead cut off where exp would overflow."""
    if not exp_behind_PSN.ndim:  # every rival is the best class
        return lead_PSN.clamp(max=_LARGEST).expm1_()
    distance_PSN = scales_S1 * (standing.lead - standing.behind)[:, None]
    far_PSN = lead_PSN.clamp(max=_LARGEST).exp_().sub_(exp_behind_PSN)
    return torch.where(distance_PSN < 1, exp_behind_PSN * distance_PSN.clamp(max=1).expm1_(), far_PSN)


def _bound_rests(duels: Duels, slab: Slab, best_PN: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on `sum_{j != a} exp(z_j - z_best)`, two tensors of shape (P, S, N)."""
    ranks = _Ranks.of(duels.descending_NK.shape[1] - 1)
    bounds_2PSN = best_PN.new_empty(2, len(slab.powers), len(slab.scales), len(duels))
    weights_2R = best_PN.new_tensor(ranks.weights())
    for rows in row_blocks(duels.descending_NK, weights_2R.shape[1]):
        values = SignedPowers.of(ranks.values(duels.select(rows), slab).T.contiguous())
        for i, power in enumerate(slab.powers):
            sums_S2N = weighted_exp_sums(values.to(power), best_PN[i, rows], slab.scales, weights_2R)
            bounds_2PSN[:, i, :, rows] = sums_S2N.movedim(1, 0)
    return bounds_2PSN[0], bounds_2PSN[1]


@dataclass(frozen=True)
class _Ranks:
    """Single ranks, the borders of the groups behind them, and the groups' sizes (each without its far border)."""

    singles: list[int]
    borders: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, n_others: int) -> "_Ranks":
        borders, width = [_SINGLE_RANKS], 2.0
        while borders[-1] < n_others - 1:
            borders.append(min(n_others - 1, borders[-1] + int(width)))
            width *= _GROUP_GROWTH
        return cls([*range(_SINGLE_RANKS), n_others - 1], borders, [b - a for a, b in pairwise(borders)])

    def values(self, duels: Duels, slab: Slab) -> Tensor:
        """v of the single ranks, then the lowest and then the highest v of each group, shape (N, R)."""
        border_logits_NR = duels.others_at(self.borders)
        borders_NR = slab.clamped(border_logits_NR)
        left_NR, right_NR = borders_NR[:, :-1], borders_NR[:, 1:]
        lowest_NR = torch.minimum(left_NR, right_NR)
        if slab.clamp == "gelu":
            turn = _GELU_DIP[0] - slab.bias
            turns_NR = (border_logits_NR[:, :-1] > turn) & (border_logits_NR[:, 1:] < turn)
            lowest_NR = lowest_NR.masked_fill(turns_NR, _GELU_DIP[1])
        singles_NR = slab.clamped(duels.others_at(self.singles))
        return torch.cat([singles_NR, lowest_NR, torch.maximum(left_NR, right_NR)], dim=1)

    def weights(self) -> list[list[float]]:
        """How often each of the values counts in the lower and in the upper bound, shape (2, R)."""
        singles, nothing = [1.0] * len(self.singles), [0.0] * len(self.sizes)
        return [[*singles, *self.sizes, *nothing], [*singles, *nothing, *self.sizes]]

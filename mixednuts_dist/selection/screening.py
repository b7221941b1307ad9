"""Which images can matter for any cutoff or count: bounds on every margin at a tenth of the cost of the margins.

Algorithm 1 needs a few order statistics of the attacked margins and, for every other image, only on which side of them
it lies. The sum over the other classes is bounded from a few ranks of each sorted row: the classes between two ranks
lie between them. Entries whose bounds leave no doubt keep a bound for a margin; all others are measured exactly. The
outcome, cutoffs and counts, is the same as with every margin exact.

The bounds are float32, their exponents differences that were taken in float64. Every exponential then has a relative
error of at most 2e-7 times its exponent, which is at most 88 before it counts as 0; `_SLACK` is several times that.

Shapes: N images, P powers, S scales, R ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..mixing.clamps import clamp_shape
from .kernel import Duels, SignedPowers, Slab, Standing, log_one_minus_gaps, row_blocks, sort_rows

_SINGLE_RANKS, _GROUP_GROWTH = 4, 4.0  # the classes behind the first ones are bounded in groups of growing size
_FEW_RANKS = 12  # so few are all summed one by one
_SLACK = 1e-4  # relative, above the rounding of the bounds
_LARGEST_LEAD, _LOWEST_RIVAL = 70.0, -17.0  # exponents that float32 can tell from larger and lower ones
_SMALLEST_ODDS, _SMALLEST_DIFFERENCE = 1e-22, 1e-30  # what is below them is bounded by 0
_BLOCK = 128 * 1024  # float32 elements on a CPU, 512 kB


def decisive_log_gaps(duels: Duels, slab: Slab, *, n_attacked: int, kept: Sequence[int]) -> Tensor:
    """`log(1 - gap)`, shape (P, S, N), float64, exact for every entry that a cutoff or a count at a cutoff depends on.

    The first `n_attacked` rows set the cutoffs: the k-th largest margin for each k of `kept`. Every other entry is a
    bound on the right side of all cutoffs of its candidate.
    """
    standing = Standing.of(duels, slab)
    low_PSN, high_PSN = _bound_odds(duels, slab, standing)
    open_W = _undecided(low_PSN, high_PSN, n_attacked, kept).flatten().nonzero().squeeze(1)
    gaps_PSN = low_PSN.reciprocal_().log1p_().neg_().double()
    gaps_PSN.view(-1)[open_W] = log_one_minus_gaps(duels, slab, standing, open_W)
    return gaps_PSN


def _undecided(low_PSN: Tensor, high_PSN: Tensor, n_attacked: int, kept: Sequence[int]) -> Tensor:
    """Which entries may lie at or across a cutoff of their candidate, NaN included; bool of the same shape."""
    last = [k - 1 for k in kept]
    cutoff_low_PSk = sort_rows(low_PSN[..., :n_attacked])[..., last]
    cutoff_high_PSk = sort_rows(high_PSN[..., :n_attacked])[..., last]
    reach_PSN = torch.full_like(low_PSN, -torch.inf)  # by how much the entry overlaps with any cutoff
    for i in range(len(kept)):
        below_PSN = cutoff_high_PSk[..., i, None] - low_PSN
        overlap_PSN = torch.minimum(high_PSN - cutoff_low_PSk[..., i, None], below_PSN, out=below_PSN)
        torch.maximum(reach_PSN, overlap_PSN, out=reach_PSN)
    return ~(reach_PSN < 0)


def _bound_odds(duels: Duels, slab: Slab, standing: Standing) -> tuple[Tensor, Tensor]:
    """Bounds on `(1 - m) / m`, each of shape (P, S, N): like log(1 - m) it falls as the margin m grows.

    Where m may be 0 or less the upper bound is infinite and the lower one as large as for any other m. Winners are the
    best class wherever their rival is another one, so that a rival far behind hardly counts.
    """
    low_PSN, high_PSN = _bound_rests(duels, slab, standing.best)
    scales_S1 = low_PSN.new_tensor(slab.scales)[:, None]
    difference_PSN = (scales_S1 * standing.lead.float()[:, None]).clamp_(max=_LARGEST_LEAD)
    rivals_PSN = low_PSN.new_ones(())
    if bool(standing.behind.any()):
        behind_PSN = (scales_S1 * standing.behind.float()[:, None]).clamp_(min=_LOWEST_RIVAL)
        difference_PSN.sub_(behind_PSN)
        rivals_PSN = behind_PSN.mul_(1 / math.log(2)).exp2_()
    difference_PSN.expm1_().mul_(rivals_PSN)
    low_PSN.add_(rivals_PSN).div_(difference_PSN.clamp(min=_SMALLEST_DIFFERENCE))
    high_PSN.add_(rivals_PSN).div_(difference_PSN.sub_(_SMALLEST_DIFFERENCE).clamp_(min=0))
    return low_PSN.mul_(1 - _SLACK).sub_(_SMALLEST_ODDS).clamp_(min=0), high_PSN.mul_(1 + _SLACK)


def _bound_rests(duels: Duels, slab: Slab, best_PN: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on `sum_{j != a} exp(z_j - z_best)`, two tensors of shape (P, S, N), float32."""
    ranks = _Ranks.of(duels.descending_NK.shape[1] - 1)
    sizes = [len(ranks.singles), len(ranks.sizes), len(ranks.sizes)]
    scales_S1 = best_PN.new_tensor(slab.scales, dtype=torch.float32).div_(math.log(2))[:, None]
    log2_sizes_R111 = best_PN.new_tensor(ranks.multiplicities(), dtype=torch.float32).log2_()[:, None, None, None]
    values = SignedPowers.of(ranks.values(duels, slab).T.contiguous())
    ahead_RPN = values.to_all(slab.powers).sub_(best_PN[:, None]).float().transpose(0, 1).contiguous()
    low_PSN, high_PSN = best_PN.new_empty(2, len(slab.powers), len(slab.scales), len(duels), dtype=torch.float32)
    for rows in row_blocks(duels.descending_NK, sum(sizes) * len(slab.scales) * len(slab.powers), _BLOCK):
        terms_RPSN = (scales_S1 * ahead_RPN[:, :, None, rows]).add_(log2_sizes_R111).exp2_()
        singles_PSN, lows_PSN, highs_PSN = (part.sum(dim=0) for part in torch.split(terms_RPSN, sizes))
        torch.add(singles_PSN, lows_PSN, out=low_PSN[..., rows])
        torch.add(singles_PSN, highs_PSN, out=high_PSN[..., rows])
    return low_PSN, high_PSN


@dataclass(frozen=True)
class _Ranks:
    """Single ranks, the borders of the groups behind them, and the groups' sizes (each without its far border)."""

    singles: list[int]
    borders: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, n_others: int) -> "_Ranks":
        if n_others <= _FEW_RANKS:
            return cls(list(range(n_others)), [], [])
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
        shape = clamp_shape(slab.clamp)
        if shape.turns_at is not None:  # a group that spans the turn reaches down to the clamp's lowest value
            turn = shape.turns_at - slab.bias
            turns_NR = (border_logits_NR[:, :-1] > turn) & (border_logits_NR[:, 1:] < turn)
            lowest_NR = lowest_NR.masked_fill(turns_NR, shape.lowest)
        singles_NR = slab.clamped(duels.others_at(self.singles))
        return torch.cat([singles_NR, lowest_NR, torch.maximum(left_NR, right_NR)], dim=1)

    def multiplicities(self) -> list[float]:
        """How many classes each of the values stands for."""
        return [*(1.0 for _ in self.singles), *self.sizes, *self.sizes]

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
from torch.nn.functional import pad

from ..mixing.clamps import clamp_shape
from .inputs import Owners
from .kernel import GapRows, RelativeLogits, SignedPowers, Slab, log_one_minus_gaps, row_blocks, sort_rows

_SINGLE_RANKS, _GROUP_GROWTH = 4, 4.0  # the classes behind the first ones are bounded in groups of growing size
_FEW_RANKS = 12  # so few are all summed one by one
_SLACK = 1e-4  # relative, above the rounding of the bounds
_LARGEST_LEAD, _LOWEST_RIVAL = 70.0, -17.0  # exponents that float32 can tell from larger and lower ones
_SMALLEST_ODDS, _SMALLEST_DIFFERENCE = 1e-22, 1e-30  # what is below them is bounded by 0
_FEW_BETAS = 64  # for more cutoffs at a time every margin is measured
_BLOCK = 128 * 1024  # float32 elements on a CPU, 512 kB


def decisive_log_gaps(
    gap_rows: GapRows,
    slab: Slab,
    *,
    owners: Owners,
    kept: Sequence[int],
    gains_E: Tensor | None = None,
    screened: bool = True,
) -> tuple[Tensor, Tensor]:
    """`log(1 - gap)` of images (P, S, n) and of the other rows (P, S, E), exact wherever a score depends on it.

    The first rows are the attacked points of n images; an image's value is the largest over its points, and the cutoff
    is the k-th smallest of the images' values, for each k of `kept`. The last E rows are counted at the cutoff. Where
    `gains_E` is given, the cutoff may also be any larger log(1 - cutoff) with a better count (`_reach`). Every entry
    that no score depends on is a bound on the right side of all cutoffs that may be chosen.
    """
    n_points = len(owners.image_M)
    relative = RelativeLogits.of(gap_rows, slab)
    low_PSN, high_PSN = _bound_odds(gap_rows, slab, relative)
    low_PSn, high_PSn = (owners.largest(bound[..., :n_points]) for bound in (low_PSN, high_PSN))
    low_PSE, high_PSE = low_PSN[..., n_points:], high_PSN[..., n_points:]
    if not screened or len(kept) > _FEW_BETAS:  # nearly every entry matters to one of so many cutoffs
        undecided_PSN = torch.ones_like(low_PSN, dtype=torch.bool)
    else:
        ranks = [k - 1 for k in kept]
        from_PSb = sort_rows(low_PSn)[..., ranks]
        to_PSb = sort_rows(high_PSn)[..., ranks]
        if gains_E is not None:
            to_PSb = _reach(low_PSE, high_PSE, gains_E, from_PSb, to_PSb)
        of_images_PSn, of_others_PSE = (
            _overlaps(low, high, from_PSb, to_PSb) for low, high in ((low_PSn, high_PSn), (low_PSE, high_PSE))
        )
        # Of an undecided image only those points matter that may have the largest value.
        may_decide_PSM = ~(high_PSN[..., :n_points] < owners.of_points(low_PSn))
        undecided_PSN = torch.cat([owners.of_points(of_images_PSn) & may_decide_PSM, of_others_PSE], dim=-1)
    open_W = undecided_PSN.flatten().nonzero().squeeze(1)
    gaps_PSN = low_PSN.reciprocal_().log1p_().neg_().double()
    gaps_PSN.view(-1)[open_W] = log_one_minus_gaps(gap_rows, slab, relative, open_W)
    return owners.largest(gaps_PSN[..., :n_points]), gaps_PSN[..., n_points:]


def _overlaps(low_PSN: Tensor, high_PSN: Tensor, from_PSb: Tensor, to_PSb: Tensor) -> Tensor:
    """Which entries may lie in one of the intervals of their candidate, NaN included; bool of the same shape."""
    reach_PSN = torch.full_like(low_PSN, -torch.inf)  # by how much the entry overlaps with any interval
    for i in range(from_PSb.shape[-1]):
        below_PSN = to_PSb[..., i, None] - low_PSN
        overlap_PSN = torch.minimum(high_PSN - from_PSb[..., i, None], below_PSN, out=below_PSN)
        torch.maximum(reach_PSN, overlap_PSN, out=reach_PSN)
    return ~(reach_PSN < 0)


def _reach(low_PSE: Tensor, high_PSE: Tensor, gains_E: Tensor, from_PSb: Tensor, to_PSb: Tensor) -> Tensor:
    """The largest odds up to which a cutoff may be the best one of its candidate, shape (P, S, b).

    Raising L = log(1 - cutoff) past a row's own value changes the count by its gain, +1 or -1. With `U(L)` the sum of
    the gains where every +1 comes at its lower and every -1 at its upper bound, and `D(L)` the other way round, the
    count relative to L = -inf lies between D and U for every L. The constraint's cutoff lies between `from` and `to`,
    so the best count is at least `M = max over L >= to of D(L)`, and no L with U(L) < M can have it.
    """
    up_PSE, up_sums = _profile(torch.where(gains_E > 0, low_PSE, high_PSE), gains_E)
    down_PSE, down_sums = _profile(torch.where(gains_E > 0, high_PSE, low_PSE), gains_E)
    # Sums are indexed by how many rows lie below L; `at` is that number, and a maximum over L >= to is one from it on.
    at_PSb = torch.searchsorted(down_PSE, to_PSb.contiguous())
    least_PSb = down_sums.flip(-1).cummax(dim=-1).values.flip(-1).gather(-1, at_PSb)
    best_from = up_sums.flip(-1).cummax(dim=-1).values.flip(-1)  # never rises along the last axis
    last_PSb = torch.searchsorted(best_from.neg(), least_PSb.neg(), right=True) - 1
    last_PSb = last_PSb.clamp_min(torch.searchsorted(up_PSE, from_PSb.contiguous()))
    ends = pad(up_PSE, (0, 1), value=math.inf)  # right where no row is undecided, too
    return torch.maximum(ends.gather(-1, last_PSb) * (1 + _SLACK), to_PSb)


def _profile(odds_PSE: Tensor, gains_E: Tensor) -> tuple[Tensor, Tensor]:
    """The odds in ascending order, and the sums of the gains of the first 0, 1, ... E of them.

    The sign of a gain rides in the last bit of its float32, so that a plain sort carries it along; bounds have a slack
    of far more than that bit.
    """
    bits = odds_PSE.clamp(max=torch.finfo(torch.float32).max).contiguous().view(torch.int32) & ~1
    ordered = sort_rows((bits | (gains_E > 0).int()).view(torch.float32))
    sums = (ordered.view(torch.int32) & 1).mul_(2).sub_(1).cumsum(dim=-1)
    return ordered, torch.nn.functional.pad(sums, (1, 0))


def _bound_odds(gap_rows: GapRows, slab: Slab, relative: RelativeLogits) -> tuple[Tensor, Tensor]:
    """Bounds on `(1 - m) / m`, each of shape (P, S, N): like log(1 - m) it falls as the margin m grows.

    Where m may be 0 or less the upper bound is infinite and the lower one as large as for any other m. Winners are the
    best class wherever their rival is another one, so that a rival far behind hardly counts.
    """
    low_PSN, high_PSN = _bound_rests(gap_rows, slab, relative.best)
    scales_S1 = low_PSN.new_tensor(slab.scales)[:, None]
    difference_PSN = (scales_S1 * relative.lead.float()[:, None]).clamp_(max=_LARGEST_LEAD)
    rivals_PSN = low_PSN.new_ones(())
    if bool(relative.behind.any()):
        behind_PSN = (scales_S1 * relative.behind.float()[:, None]).clamp_(min=_LOWEST_RIVAL)
        difference_PSN.sub_(behind_PSN)
        rivals_PSN = behind_PSN.mul_(1 / math.log(2)).exp2_()
    difference_PSN.expm1_().mul_(rivals_PSN)
    low_PSN.add_(rivals_PSN).div_(difference_PSN.clamp(min=_SMALLEST_DIFFERENCE))
    high_PSN.add_(rivals_PSN).div_(difference_PSN.sub_(_SMALLEST_DIFFERENCE).clamp_(min=0))
    return low_PSN.mul_(1 - _SLACK).sub_(_SMALLEST_ODDS).clamp_(min=0), high_PSN.mul_(1 + _SLACK)


def _bound_rests(gap_rows: GapRows, slab: Slab, best_PN: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on `sum_{j != a} exp(z_j - z_best)`, two tensors of shape (P, S, N), float32."""
    ranks = _Ranks.of(gap_rows.descending_NK.shape[1] - 1)
    sizes = [len(ranks.singles), len(ranks.sizes), len(ranks.sizes)]
    scales_S1 = best_PN.new_tensor(slab.scales, dtype=torch.float32).div_(math.log(2))[:, None]
    log2_sizes_R111 = best_PN.new_tensor(ranks.multiplicities(), dtype=torch.float32).log2_()[:, None, None, None]
    values = SignedPowers.of(ranks.values(gap_rows, slab).T.contiguous())
    ahead_RPN = values.to_all(slab.powers).sub_(best_PN[:, None]).float().transpose(0, 1).contiguous()
    low_PSN, high_PSN = best_PN.new_empty(2, len(slab.powers), len(slab.scales), len(gap_rows), dtype=torch.float32)
    for rows in row_blocks(gap_rows.descending_NK, sum(sizes) * len(slab.scales) * len(slab.powers), _BLOCK):
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

    def values(self, gap_rows: GapRows, slab: Slab) -> Tensor:
        """v of the single ranks, then the lowest and then the highest v of each group, shape (N, R)."""
        border_logits_NR = gap_rows.others_at(self.borders)
        borders_NR = slab.clamped(border_logits_NR)
        left_NR, right_NR = borders_NR[:, :-1], borders_NR[:, 1:]
        lowest_NR = torch.minimum(left_NR, right_NR)
        shape = clamp_shape(slab.clamp)
        if shape.turns_at is not None:  # a group that spans the turn reaches down to the clamp's lowest value
            turn = shape.turns_at - slab.bias
            turns_NR = (border_logits_NR[:, :-1] > turn) & (border_logits_NR[:, 1:] < turn)
            lowest_NR = lowest_NR.masked_fill(turns_NR, shape.lowest)
        singles_NR = slab.clamped(gap_rows.others_at(self.singles))
        return torch.cat([singles_NR, lowest_NR, torch.maximum(left_NR, right_NR)], dim=1)

    def multiplicities(self) -> list[float]:
        """How many classes each of the values stands for."""
        return [*(1.0 for _ in self.singles), *self.sizes, *self.sizes]

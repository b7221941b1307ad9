"""Sums of exponentials of the same values at many scales, `sum_j exp(s (x_j - shift))`: the cost of Algorithm 1.

Rows come in (almost) descending order. A head of each row is summed term by term. In the tail, where the values differ
so little that `s (x_j - centre)` is small at every scale, `sum_j exp(s (x_j - centre))` is the series
`sum_n s^n / n! sum_j (x_j - centre)^n`, whose power sums serve all scales. Both are good to float64's rounding.

Shapes: N rows, K values a row, S scales.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 128 * 1024  # float64 elements, 1 MB
_FEW_TERMS = 128 * 1024  # so few are summed term by term: the series has a cost of its own
_TERM_COST, _MOMENT_COST = 0.65, 0.25  # ns a value: exp2 with its scaling and sum, against a product and its sum
_REMAINDER = 1e-15  # of the series, relative to its sum


@dataclass(frozen=True)
class _Series:
    """A Taylor series of exp: `n_terms` of it suffice up to |x| = radius."""

    n_terms: int
    radius: float


_SERIES = tuple(_Series(n, (_REMAINDER * math.factorial(n)) ** (1 / n)) for n in (4, 5, 6, 7, 8, 10, 12, 15, 19))


@dataclass(frozen=True)
class Split:
    """How many leading columns to sum term by term, and the series about `centre` for the columns behind them."""

    head: int
    centre: float = 0.0
    n_terms: int = 0


def split_columns(columns_K: Tensor, lowest: float, scales: Sequence[float], *, n_rows: int) -> Split:
    """The cheapest split for rows whose columns reach up to `columns_K` and whose values are at least `lowest`."""
    n_values, largest_scale = len(columns_K), max(scales)
    cost, best = n_values * len(scales) * _TERM_COST, Split(n_values)
    if n_rows * n_values * len(scales) <= _FEW_TERMS:
        return best
    reach = [series.radius / largest_scale for series in _SERIES]
    above = columns_K > columns_K.new_tensor([lowest + 2 * radius for radius in reach])[:, None]
    heads = (above * torch.arange(1, n_values + 1, device=above.device)).amax(dim=1).tolist()
    for head, radius, series in zip(heads, reach, _SERIES, strict=True):
        total = head * len(scales) * _TERM_COST + (n_values - head) * series.n_terms * _MOMENT_COST
        if total < cost:
            cost, best = total, Split(head, lowest + radius, series.n_terms)
    return best


def scaled_exp_sums(values_NK: Tensor, shifts_N: Tensor, scales: Sequence[float], split: Split) -> Tensor:
    """`sum_j exp(s (x_j - shift))`, shape (S, N), float64, by a split that `split_columns` found for these rows."""
    sums_SN = _term_by_term(values_NK[:, : split.head], shifts_N, scales)
    if split.head < values_NK.shape[1]:
        sums_SN += _by_moments(values_NK[:, split.head :], shifts_N, scales, split)
    return sums_SN


def weighted_exp_sums(values_KN: Tensor, shifts_N: Tensor, scales: Sequence[float], weights_WK: Tensor) -> Tensor:
    """`sum_j w_j exp(s (x_j - shift))` for every row of weights, shape (S, W, N), float64; one image a column."""
    return torch.cat([weights_WK @ terms_SKN for terms_SKN in _terms(values_KN - shifts_N, scales)])


def _term_by_term(values_NK: Tensor, shifts_N: Tensor, scales: Sequence[float]) -> Tensor:
    return torch.cat([terms_SNK.sum(dim=-1) for terms_SNK in _terms(values_NK - shifts_N[:, None], scales)])


def _terms(exponents: Tensor, scales: Sequence[float]) -> Iterator[Tensor]:
    """`exp(s x)` for some scales at a time, a new first dimension, in blocks small enough for the cache."""
    factors_S11 = exponents.new_tensor([scale / math.log(2) for scale in scales])[:, None, None]
    for part_S11 in factors_S11.split(max(1, _BLOCK // max(1, exponents.numel()))):  # type: ignore[no-untyped-call]
        yield (exponents * part_S11).exp2_()


def _by_moments(values_NK: Tensor, shifts_N: Tensor, scales: Sequence[float], split: Split) -> Tensor:
    offsets_NK = values_NK - split.centre
    powers_NK = offsets_NK.clone()
    moments = offsets_NK.new_full((split.n_terms, len(shifts_N)), offsets_NK.shape[1])
    for n in range(1, split.n_terms):
        if n > 1:
            powers_NK.mul_(offsets_NK)
        torch.sum(powers_NK, dim=1, out=moments[n])
    weights = [[scale**n / math.factorial(n) for n in range(split.n_terms)] for scale in scales]
    scales_S1 = offsets_NK.new_tensor(scales)[:, None]
    return (offsets_NK.new_tensor(weights) @ moments).mul_((scales_S1 * (split.centre - shifts_N)).exp_())

"""The inner loop of Algorithm 1: `log(1 - margin)` of images under scales and powers, for one bias.

A margin is the lead `p_a - p_b` of a class a, the winner, over a class b, its rival. It depends on the other classes
only through `R = sum_{j != a} e^{z_j}`, which is computed relative to the largest of its terms.

The loop is fast because it evaluates the clamp once for all powers and scales, and `|v|^p` once for all scales. Powers
and exponentials are computed as powers of two, and rows are processed in blocks that fit into the cache.

Shapes: N rows, n of them in a block, K classes, R ranks, P powers, S scales.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mixing.clamps import Clamp, clamp_logits
from ..mixing.margins import log_one_minus_lead_from_parts

_CPU_BLOCK = 128 * 1024  # float64 elements, 1 MB
_ACCELERATOR_BLOCK = 1 << 24


class Slab(NamedTuple):
    """The candidates that are scored together: one bias with some powers and scales."""

    bias: float
    clamp: Clamp
    powers: Sequence[float]
    scales: Sequence[float]


class LeadRows(NamedTuple):
    """Rows of LayerNormed logits, each with a winner and a rival. The lead of the winner over the rival is computed."""

    descending_NK: Tensor  # float64, each row sorted
    winner_ranks_N: Tensor  # int64, the winner's place in its row: 0 is the class of the largest logit
    rivals_N: Tensor  # float64, the rivals' logits; NaN means the best class except for the winner


def log_one_minus_leads(rows: LeadRows, slab: Slab) -> Tensor:
    """Return `log(1 - (p_a - p_b))` of the softmax of `s |v|^p sign(v)`, `v = Clamp(h + c)`, (P, S, N) float64.

    The result is not defined if the rival is the winner itself.
    """
    best_PN, lead_PN, behind_PN = _relative_logits(rows, slab)
    scales_S1 = best_PN.new_tensor(slab.scales)[:, None]
    return log_one_minus_lead_from_parts(
        _exp_sums(rows, slab, best_PN), lead_PN[:, None] * scales_S1, behind_PN[:, None] * scales_S1
    )


def _relative_logits(rows: LeadRows, slab: Slab) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best transformed logit except the winner's at scale 1, and the winner's and rival's minus it, (P, N).

    Each clamp increases, or first decreases and then increases, so the best of the other classes has the largest or the
    smallest logit. Equal logits are set to equal values, because vectorized functions may round an element differently
    depending on its place in memory.
    """
    last_rank = rows.descending_NK.shape[1] - 2
    first_N, last_N = _others(rows.descending_NK, rows.winner_ranks_N, [0, last_rank]).unbind(dim=1)
    winner_N = rows.descending_NK.gather(1, rows.winner_ranks_N[:, None]).squeeze(1)
    signs_4N, log2_4N = _clamped(torch.stack([first_N, last_N, winner_N, rows.rivals_N]), slab)
    first_PN, last_PN, winner_PN, rival_PN = _signed_powers(signs_4N, log2_4N, slab.powers).unbind(1)
    for other_N, other_PN in ((first_N, first_PN), (last_N, last_PN)):
        winner_PN = torch.where(winner_N == other_N, other_PN, winner_PN)
        rival_PN = torch.where(rows.rivals_N == other_N, other_PN, rival_PN)
    best_PN = torch.maximum(first_PN, last_PN)
    return best_PN, winner_PN - best_PN, (rival_PN - best_PN).nan_to_num_(nan=0.0)


def _exp_sums(rows: LeadRows, slab: Slab, best_PN: Tensor) -> Tensor:
    """Return `sum_{j != a} exp(s (z_j - z_best))`, (P, S, N)."""
    n_rows, n_others = len(rows.descending_NK), rows.descending_NK.shape[1] - 1
    factors_S11 = (best_PN.new_tensor(slab.scales) / math.log(2))[:, None, None]
    sums_PSN = best_PN.new_empty(len(slab.powers), len(slab.scales), n_rows)
    elements = _CPU_BLOCK if best_PN.device.type == "cpu" else _ACCELERATOR_BLOCK
    height = max(1, elements // (n_others * len(slab.scales)))
    for block in (slice(start, start + height) for start in range(0, n_rows, height)):
        others_nR = _others(rows.descending_NK[block], rows.winner_ranks_N[block], range(n_others))
        signs_nR, log2_nR = _clamped(others_nR, slab)
        for i, power in enumerate(slab.powers):
            relative_nR = _signed_powers(signs_nR, log2_nR, [power])[0].sub_(best_PN[i, block, None])
            sums_PSN[i, :, block] = (relative_nR * factors_S11).exp2_().sum(dim=-1)
    return sums_PSN


def _others(descending_NK: Tensor, winner_ranks_N: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the logits at some ranks among all but the winners', (N, R); ranks from the winner's on shift by one."""
    if len(ranks) == descending_NK.shape[1] - 1 and not bool(winner_ranks_N.any()):
        return descending_NK[:, 1:]
    index_R = torch.tensor(ranks, dtype=torch.int64, device=descending_NK.device)
    return descending_NK.gather(1, index_R + (index_R >= winner_ranks_N[:, None]).long())


def _clamped(normed: Tensor, slab: Slab) -> tuple[Tensor, Tensor]:
    """Return the sign and the base-2 logarithm of |v|, for `v = Clamp(h + c)` of LayerNormed logits h."""
    values = clamp_logits(normed + slab.bias, slab.clamp)
    return values.sign(), values.abs().log2_()


def _signed_powers(signs: Tensor, log2: Tensor, powers: Sequence[float]) -> Tensor:
    """Return `|v|^p sign(v)` for every power, a new first dimension."""
    exponents = log2.new_tensor(powers).reshape(-1, *(1 for _ in log2.shape))
    return (log2 * exponents).exp2_().mul_(signs)


def sort_rows(values: Tensor) -> Tensor:
    """Sort along the last axis; on a CPU numpy uses wide registers and is ten times as fast as torch."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))

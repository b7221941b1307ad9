"""The inner loop of Algorithm 1: `log(1 - margin)` of images under scales and powers, for one bias.

The gap of a winner a to a rival b depends on the other classes only by `R = sum_{j != a} e^{z_j}`, which is computed
relative to the largest of its terms.

It is fast because the clamp is evaluated once for all powers and scales and `|v|^p` once for all scales, powers and
exponentials are computed as powers of two, and rows are processed in blocks that fit into the cache.

Shapes: N images, n of them in a block, K classes, P powers, S scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..mixing.clamps import Clamp, clamp_logits
from ..mixing.margins import log_one_minus_gap_from_parts

_CPU_BLOCK = 128 * 1024  # float64 elements, 1 MB
_ACCELERATOR_BLOCK = 1 << 24


@dataclass(frozen=True)
class Slab:
    """The candidates that are scored together: one bias with some powers and scales."""

    bias: float
    clamp: Clamp
    powers: Sequence[float]
    scales: Sequence[float]

    def clamped(self, normed: Tensor) -> Tensor:
        """Return v of LayerNormed logits."""
        return clamp_logits(normed + self.bias, self.clamp)

    def mapped(self, normed: Tensor) -> Tensor:
        """Return the logits at scale 1 for every power, a new first dimension."""
        return SignedPowers.of(self.clamped(normed)).to_all(self.powers)


@dataclass(frozen=True)
class SignedPowers:
    """`|v|^p sign(v)` for many p."""

    signs: Tensor
    log2: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "SignedPowers":
        """Return the signs and base-2 logarithms of `values`."""
        return cls(values.sign(), values.abs().log2_())

    def to_all(self, powers: Sequence[float]) -> Tensor:
        """Return the values to each of these powers, a new first dimension."""
        exponents = self.log2.new_tensor(powers).reshape(-1, *(1 for _ in self.log2.shape))
        return (self.log2 * exponents).exp2_().mul_(self.signs)


@dataclass(frozen=True)
class GapRows:
    """Rows of LayerNormed logits, each with two classes, the winner and its rival, whose gap is computed.

    The winner is given by its rank in the row: 0 is the class of the largest logit. `rivals_N` are the rivals'
    LayerNormed logits; NaN stands for the best class but the winner.
    """

    descending_NK: Tensor  # float64, each row sorted
    winner_ranks_N: Tensor  # int64
    rivals_N: Tensor  # float64

    def __len__(self) -> int:
        return len(self.descending_NK)

    def select(self, rows: slice | Tensor) -> "GapRows":
        """Return some of the rows."""
        return GapRows(self.descending_NK[rows], self.winner_ranks_N[rows], self.rivals_N[rows])

    def winners(self) -> Tensor:
        """Return the winners' logits, (N,)."""
        return self.descending_NK.gather(1, self.winner_ranks_N[:, None]).squeeze(1)

    def others(self) -> Tensor:
        """Return all logits but the winners', descending, (N, K - 1)."""
        if not bool(self.winner_ranks_N.any()):
            return self.descending_NK[:, 1:]
        return self.others_at(range(self.descending_NK.shape[1] - 1))

    def others_at(self, ranks: Sequence[int]) -> Tensor:
        """Return some columns of `others`, (N, len(ranks)); those from the winner's rank on are shifted by one."""
        index_R = torch.tensor(ranks, dtype=torch.int64, device=self.descending_NK.device)
        return self.descending_NK.gather(1, index_R + (index_R >= self.winner_ranks_N[:, None]).long())


def log_one_minus_gaps(rows: GapRows, slab: Slab) -> Tensor:
    """Return `log(1 - (p_a - p_b))` of the softmax of `s |v|^p sign(v)`, `v = Clamp(h + c)`, (P, S, N) float64.

    The result is not defined if the rival is the winner itself.
    """
    best_PN, lead_PN, behind_PN = _relative_logits(rows, slab)
    scales_S1 = best_PN.new_tensor(slab.scales)[:, None]
    return log_one_minus_gap_from_parts(
        _exp_sums(rows, slab, best_PN), lead_PN[:, None] * scales_S1, behind_PN[:, None] * scales_S1
    )


def _relative_logits(rows: GapRows, slab: Slab) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best logit but the winner's at scale 1, and the winner's and the rival's minus it, each (P, N).

    Each clamp rises, or falls then rises, so the best of the others has the largest or the smallest logit. Equal logits
    are set to equal values, since vectorized functions may round an element differently by its place in memory.
    """
    first_N, last_N = rows.others_at([0, rows.descending_NK.shape[1] - 2]).unbind(dim=1)
    winner_N, rival_N = rows.winners(), rows.rivals_N
    first_PN, last_PN, winner_PN, rival_PN = slab.mapped(torch.stack([first_N, last_N, winner_N, rival_N])).unbind(1)
    for other_N, other_PN in ((first_N, first_PN), (last_N, last_PN)):
        winner_PN = torch.where(winner_N == other_N, other_PN, winner_PN)
        rival_PN = torch.where(rival_N == other_N, other_PN, rival_PN)
    best_PN = torch.maximum(first_PN, last_PN)
    return best_PN, winner_PN - best_PN, (rival_PN - best_PN).nan_to_num_(nan=0.0)


def _exp_sums(rows: GapRows, slab: Slab, best_PN: Tensor) -> Tensor:
    """Return `sum_{j != a} exp(s (z_j - z_best))`, (P, S, N)."""
    n_others = rows.descending_NK.shape[1] - 1
    factors_S11 = (best_PN.new_tensor(slab.scales) / math.log(2))[:, None, None]
    sums_PSN = best_PN.new_empty(len(slab.powers), len(slab.scales), len(rows))
    for block in row_blocks(rows.descending_NK, n_others * len(slab.scales)):
        others = SignedPowers.of(slab.clamped(rows.select(block).others()))
        for i, power in enumerate(slab.powers):
            relative_nK = others.to_all([power])[0].sub_(best_PN[i, block, None])
            sums_PSN[i, :, block] = (relative_nK * factors_S11).exp2_().sum(dim=-1)
    return sums_PSN


def row_blocks(values: Tensor, width: int) -> list[slice]:
    """Return slices of rows such that a block of them with `width` columns fits into the cache."""
    elements = _CPU_BLOCK if values.device.type == "cpu" else _ACCELERATOR_BLOCK
    n_rows = max(1, elements // width)
    return [slice(start, start + n_rows) for start in range(0, len(values), n_rows)]


def sort_rows(values: Tensor) -> Tensor:
    """Sort along the last axis; on a CPU numpy uses wide registers and is ten times as fast as torch."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))

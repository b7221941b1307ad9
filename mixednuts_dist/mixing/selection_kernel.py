"""The inner loop of Algorithm 1: `log(1 - margin)` of every image under every scale and power, for one bias.

What a winner a and a rival b need of the other classes is `R = sum_{j != a} e^{z_j}`, relative to the best of them.

What makes it fast: the clamp is evaluated once for all powers and scales, `|v|^p` once for all scales; powers and
exponentials are powers of two; rows go through in blocks that stay in the cache.

Shapes: N images, K classes, P powers, S scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exp_sums import scaled_exp_sums, split_columns
from .margins import log_one_minus_gap_from_parts
from .transforms import Clamp, clamp_logits

_CPU_BLOCK = 128 * 1024  # float64 elements, 1 MB
_ACCELERATOR_BLOCK = 1 << 24


@dataclass(frozen=True)
class Slab:
    """The candidates that are measured at a time: one bias with some powers and scales."""

    bias: float
    clamp: Clamp
    powers: Sequence[float]
    scales: Sequence[float]

    def clamped(self, normed: Tensor) -> Tensor:
        """v of LayerNormed logits."""
        return clamp_logits(normed + self.bias, self.clamp)

    def mapped(self, normed: Tensor) -> Tensor:
        """The logits at scale 1 for every power, a new first dimension."""
        values = SignedPowers.of(self.clamped(normed))
        powers = normed.new_tensor(self.powers).reshape(-1, *(1 for _ in normed.shape))
        return (values.log2 * powers).exp2_().mul_(values.signs)


@dataclass(frozen=True)
class SignedPowers:
    """`|v|^p sign(v)` for many p."""

    signs: Tensor
    log2: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "SignedPowers":
        """What all powers of `values` share."""
        return cls(values.sign(), values.abs().log2_())

    def to(self, power: float) -> Tensor:
        """The values to this power."""
        return (self.log2 * power).exp2_().mul_(self.signs)


@dataclass(frozen=True)
class Duels:
    """Rows of LayerNormed logits with the two classes whose gap is asked for.

    The winner is the class of the largest logit, or of the smallest where `flipped_N`; `rivals_N` are the rivals'
    LayerNormed logits, NaN for the best class beside the winner.
    """

    descending_NK: Tensor  # float64, each row sorted
    flipped_N: Tensor  # bool
    rivals_N: Tensor  # float64

    def __len__(self) -> int:
        return len(self.descending_NK)

    def select(self, rows: slice | Tensor) -> "Duels":
        """Some of the rows."""
        return Duels(self.descending_NK[rows], self.flipped_N[rows], self.rivals_N[rows])

    def winners(self) -> Tensor:
        """The winners' logits, shape (N,)."""
        return torch.where(self.flipped_N, self.descending_NK[:, -1], self.descending_NK[:, 0])

    def others(self) -> Tensor:
        """The logits beside the winners', descending, shape (N, K - 1)."""
        if not bool(self.flipped_N.any()):
            return self.descending_NK[:, 1:]
        return torch.where(self.flipped_N[:, None], self.descending_NK[:, :-1], self.descending_NK[:, 1:])

    def others_at(self, ranks: Sequence[int]) -> Tensor:
        """Some columns of `others`, shape (N, len(ranks))."""
        index = torch.tensor(ranks, device=self.descending_NK.device)
        after_N1 = 1 - self.flipped_N[:, None].long()
        return self.descending_NK.gather(1, index + after_N1)


@dataclass(frozen=True)
class Standing:
    """Winner and rival relative to the best class beside the winner, at scale 1, each of shape (P, N)."""

    best: Tensor  # not relative
    lead: Tensor
    behind: Tensor

    @classmethod
    def of(cls, duels: Duels, slab: Slab) -> "Standing":
        """The best class is the first or the last of the others: a clamp has no peak in between.

        Equal logits are given equal values: vectorised functions may round them differently by their place in memory.
        """
        first_N, last_N = duels.others_at([0, duels.descending_NK.shape[1] - 2]).unbind(dim=1)
        winner_N, rival_N = duels.winners(), duels.rivals_N
        first_PN, last_PN, winner_PN, rival_PN = slab.mapped(torch.stack([first_N, last_N, winner_N, rival_N])).unbind(
            1
        )
        for other_N, other_PN in ((first_N, first_PN), (last_N, last_PN)):
            winner_PN = torch.where(winner_N == other_N, other_PN, winner_PN)
            rival_PN = torch.where(rival_N == other_N, other_PN, rival_PN)
        best_PN = torch.maximum(first_PN, last_PN)
        return cls(best_PN, winner_PN - best_PN, (rival_PN - best_PN).nan_to_num_(nan=0.0))


def log_one_minus_gaps(duels: Duels, slab: Slab) -> Tensor:
    """`log(1 - (p_a - p_b))` of the softmax of `s |v|^p sign(v)`, `v = Clamp(h + c)`, shape (P, S, N), float64.

    Where the rival is the winner itself the result means nothing.
    """
    n_images, n_classes = duels.descending_NK.shape
    standing = Standing.of(duels, slab)
    rest_PSN = duels.descending_NK.new_empty(len(slab.powers), len(slab.scales), n_images)
    for rows in row_blocks(duels.descending_NK, n_classes):
        clamped_NK = slab.clamped(duels.select(rows).others())
        columns, lowest = SignedPowers.of(clamped_NK.amax(dim=0)), SignedPowers.of(clamped_NK.amin())
        others = SignedPowers.of(clamped_NK)
        for i, power in enumerate(slab.powers):
            split = split_columns(columns.to(power), float(lowest.to(power)), slab.scales, n_rows=len(clamped_NK))
            rest_PSN[i, :, rows] = scaled_exp_sums(others.to(power), standing.best[i, rows], slab.scales, split)
    scales_S1 = rest_PSN.new_tensor(slab.scales)[:, None]
    return log_one_minus_gap_from_parts(
        rest_PSN, scales_S1 * standing.lead[:, None], scales_S1 * standing.behind[:, None]
    )


def row_blocks(values: Tensor, width: int) -> list[slice]:
    """Slices of the rows of `values` such that a float64 table of that many rows and `width` columns stays small."""
    elements = _CPU_BLOCK if values.device.type == "cpu" else _ACCELERATOR_BLOCK
    n_rows = max(1, elements // width)
    return [slice(start, start + n_rows) for start in range(0, len(values), n_rows)]

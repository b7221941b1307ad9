"""The inner loop of Algorithm 1: `log(1 - margin)` of every image under every scale and power, for one bias.

For a winner a and a rival b, `1 - (p_a - p_b) = (R + e^{z_b}) / (R + e^{z_a})` with `R = sum_{j != a} e^{z_j}`; taken
relative to the best class beside a, nothing overflows, cancels or saturates.

What makes it fast: the clamp is evaluated once for all powers and scales, `|v|^p` once for all scales; powers and
exponentials are powers of two; rows go through in blocks that stay in the cache.

Shapes: N images, K classes, P powers, S scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exp_sums import scaled_exp_sums, split_columns
from .transforms import Clamp, clamp_logits

_CPU_BLOCK = 128 * 1024  # float64 elements, 384 KB: two such buffers stay in the cache
_ACCELERATOR_BLOCK = 1 << 24


@dataclass(frozen=True)
class Duels:
    """Rows of LayerNormed logits with the two classes whose gap is asked for.

    The winner is the class of the largest logit, or of the smallest where `flipped_N`; `rivals_N` are the rivals'
    LayerNormed logits, NaN for the best class beside the winner.
    """

    descending_NK: Tensor  # float64, each row sorted
    flipped_N: Tensor  # bool
    rivals_N: Tensor  # float64

    def block(self, rows: slice) -> "Duels":
        """Some of the rows."""
        return Duels(self.descending_NK[rows], self.flipped_N[rows], self.rivals_N[rows])

    def winners(self) -> Tensor:
        """The winners' LayerNormed logits, shape (N,)."""
        return torch.where(self.flipped_N, self.descending_NK[:, -1], self.descending_NK[:, 0])

    def others(self) -> Tensor:
        """The logits beside the winners', descending, shape (N, K - 1)."""
        if not bool(self.flipped_N.any()):
            return self.descending_NK[:, 1:]
        return torch.where(self.flipped_N[:, None], self.descending_NK[:, :-1], self.descending_NK[:, 1:])


def log_one_minus_gaps(
    duels: Duels, *, bias: float, clamp: Clamp, powers: Sequence[float], scales: Sequence[float]
) -> Tensor:
    """`log(1 - (p_a - p_b))` of the softmax of `s |v|^p sign(v)`, `v = Clamp(h + c)`, shape (P, S, N), float64.

    Where the rival is the winner itself the result means nothing.
    """
    n_images, n_classes = duels.descending_NK.shape
    rest_PSN = duels.descending_NK.new_empty(len(powers), len(scales), n_images)
    best_PN = duels.descending_NK.new_empty(len(powers), n_images)
    n_rows = max(1, _block_elements(duels.descending_NK) // n_classes)
    for start in range(0, n_images, n_rows):
        rows = slice(start, start + n_rows)
        clamped_NK = clamp_logits(duels.block(rows).others() + bias, clamp)
        columns, lowest = _Powers.of(clamped_NK.amax(dim=0)), _Powers.of(clamped_NK.amin())
        others = _Powers.of(clamped_NK)
        for i, power in enumerate(powers):
            powered_NK = others.to(power)
            split = split_columns(columns.to(power), float(lowest.to(power)), scales)
            best_PN[i, rows] = torch.maximum(powered_NK[:, 0], powered_NK[:, -1])  # a clamp has no peak in between
            rest_PSN[i, :, rows] = scaled_exp_sums(powered_NK, best_PN[i, rows], scales, split)
    lead_PN = _mapped(duels.winners(), bias, clamp, powers) - best_PN
    behind_PN = _mapped(duels.rivals_N, bias, clamp, powers).sub_(best_PN).nan_to_num_(nan=0.0)
    scales_S1 = rest_PSN.new_tensor(scales)[:, None]
    numerator_PSN = (scales_S1 * behind_PN[:, None]).exp_().add_(rest_PSN).log_()
    return numerator_PSN.sub_(torch.logaddexp(rest_PSN.log_(), scales_S1 * lead_PN[:, None]))


@dataclass(frozen=True)
class _Powers:
    """`|v|^p sign(v)` for many p."""

    signs: Tensor
    log2: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "_Powers":
        return cls(values.sign(), values.abs().log2_())

    def to(self, power: float) -> Tensor:
        return (self.log2 * power).exp2_().mul_(self.signs)


def _mapped(normed_N: Tensor, bias: float, clamp: Clamp, powers: Sequence[float]) -> Tensor:
    """The logits at scale 1, shape (P, N)."""
    values = _Powers.of(clamp_logits(normed_N + bias, clamp))
    return torch.stack([values.to(power) for power in powers])


def _block_elements(values: Tensor) -> int:
    return _CPU_BLOCK if values.device.type == "cpu" else _ACCELERATOR_BLOCK

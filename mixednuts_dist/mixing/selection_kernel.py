"""The inner loop of Algorithm 1: `log(1 - margin)` of every image under every scale and power, for one bias.

For a winner a and a rival b, `1 - (p_a - p_b) = (R + e^{z_b}) / (R + e^{z_a})` with `R = sum_{j != a} e^{z_j}`; taken
relative to the best class beside a, nothing overflows, cancels or saturates.

What makes it fast: the clamp is evaluated once for all powers and scales, `|v|^p` once for all scales; powers and
exponentials are powers of two; rows go through in blocks that stay in the cache.

Shapes: N images, K classes, P powers, S scales.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_CPU_BLOCK = 48 * 1024  # float64 elements: two such buffers fit a 1 MB cache
_ACCELERATOR_BLOCK = 1 << 24
BEST_RIVAL = -1  # as a rival: the best class beside the winner


def log_one_minus_gaps(
    clamped_NK: Tensor, winners_N: Tensor, rivals_N: Tensor, *, powers: Sequence[float], scales: Sequence[float]
) -> Tensor:
    """`log(1 - (p_winner - p_rival))` of the softmax of `s |v|^p sign(v)`, shape (P, S, N), float64.

    Args:
        clamped_NK: v, the clamped logits, float64.
        winners_N: class a of each row.
        rivals_N: class b of each row, or BEST_RIVAL; where it equals the winner the result means nothing.
    """
    gaps_PSN = clamped_NK.new_empty(len(powers), len(scales), len(clamped_NK))
    scales_S = clamped_NK.new_tensor(scales)
    n_rows = max(1, _block_elements(clamped_NK) // clamped_NK.shape[1])
    for start in range(0, len(clamped_NK), n_rows):
        rows = slice(start, start + n_rows)
        signs_NK, log2_NK = clamped_NK[rows].sign(), clamped_NK[rows].abs().log2()
        for i, power in enumerate(powers):
            powered_NK = (log2_NK * power).exp2_().mul_(signs_NK)
            gaps_PSN[i, :, rows] = _block_gaps(powered_NK, winners_N[rows, None], rivals_N[rows], scales_S)
    return gaps_PSN


def _block_gaps(powered_NK: Tensor, winners_N1: Tensor, rivals_N: Tensor, scales_S: Tensor) -> Tensor:
    """The result for one power and one block of rows, shape (S, N); `powered_NK` is used up."""
    winner_N = powered_NK.gather(1, winners_N1).squeeze(1)
    rival_N = powered_NK.gather(1, rivals_N.clamp_min(0)[:, None]).squeeze(1)
    powered_NK.scatter_(1, winners_N1, -torch.inf)
    best_N = powered_NK.amax(dim=1)
    rest_SN = _sum_exp(powered_NK.sub_(best_N[:, None]), scales_S)
    scales_S1 = scales_S[:, None]
    behind_SN = scales_S1 * torch.where(rivals_N == BEST_RIVAL, 0.0, rival_N - best_N)
    return (rest_SN + behind_SN.exp()).log_() - torch.logaddexp(rest_SN.log(), scales_S1 * (winner_N - best_N))


def _sum_exp(exponents_NK: Tensor, scales_S: Tensor) -> Tensor:
    """`sum_j exp(s x_j)`, shape (S, N)."""
    sums_SN = exponents_NK.new_empty(len(scales_S), len(exponents_NK))
    buffer_NK = torch.empty_like(exponents_NK)
    for i, scale in enumerate(scales_S.tolist()):
        torch.mul(exponents_NK, scale / math.log(2), out=buffer_NK)
        torch.sum(buffer_NK.exp2_(), dim=1, out=sums_SN[i])
    return sums_SN


def _block_elements(values: Tensor) -> int:
    return _CPU_BLOCK if values.device.type == "cpu" else _ACCELERATOR_BLOCK

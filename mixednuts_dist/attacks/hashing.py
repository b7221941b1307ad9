"""Random numbers that depend on a key and a counter alone: SplitMix64 (Steele et al. 2014) as a hash.

Nothing has to be kept or advanced, and any query's draws are known without those before it.
"""

import hashlib

import torch
from torch import Tensor

# SplitMix64's constants, as signed 64 bits.
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def image_key(*key: object) -> int:
    """64 bits, signed, that depend on `key` alone."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def keys_of(x_BCHW: Tensor, key: int) -> Tensor:
    """A key for each point, of `key` and its values alone: (B,) int64, the same in any batch."""
    values_BD = x_BCHW.float().flatten(1).contiguous().view(torch.int32).long()
    weights_1D = hashed(torch.tensor([key], device=x_BCHW.device), 0, values_BD.shape[1])
    return (values_BD * (2 * weights_1D + 1)).sum(dim=1)  # integers: the order of the sum is none of its


def hashed(keys_B: Tensor, first: Tensor | int, n: int) -> Tensor:
    """The hashes of (key, counter) for the counters `first` ... `first + n - 1`; (B, n) int64, which wraps around."""
    counters = torch.arange(1, n + 1, device=keys_B.device) + (first[:, None] if isinstance(first, Tensor) else first)
    z = keys_B[:, None] + counters * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros coming in; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def below(draws: Tensor, limit: Tensor) -> Tensor:
    """Integers in [0, limit), 0 where the limit is 0: the upper 31 bits times the limit, divided by 2^31."""
    return (_shifted(draws, 33) * limit) >> 31

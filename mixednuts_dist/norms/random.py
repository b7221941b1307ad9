"""Random numbers that depend on a key and a counter alone: SplitMix64 (Steele et al. 2014) used as a hash.

All random numbers of the attacks come from here, on the device of the images. The key of an image determines its
numbers, and the rest of the batch has no influence. Shapes: B keys, int64.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# SplitMix64's constants, as signed 64 bits.
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_KEYS_AT_ONCE = 16  # bounds the memory of the 64-bit integers


def key_number(*key: object) -> int:
    """Return a number in 0 .. 2^63 - 1 that depends only on the parts of the key, and is the same on all platforms."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def keys_of(x_BCHW: Tensor, key: int) -> Tensor:
    """Return a key per image, (B,), that depends only on `key` and the pixels."""
    values_BD = x_BCHW.float().flatten(1).contiguous().view(torch.int32).long()
    weights_1D = hashed(torch.tensor([key], device=x_BCHW.device), 0, values_BD.shape[1])
    # Integer addition wraps around, so the result does not depend on summation order.
    return (values_BD * (2 * weights_1D + 1)).sum(dim=1)


def hashed(keys_B: Tensor, first: Tensor | int, n: int) -> Tensor:
    """Return the hashes of (key, counter) for the counters `first` ... `first + n - 1`, (B, n) int64."""
    counters = torch.arange(1, n + 1, device=keys_B.device) + (first[:, None] if isinstance(first, Tensor) else first)
    z = keys_B[:, None] + counters * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def below(draws: Tensor, limit: Tensor) -> Tensor:
    """Map the upper 31 bits of hashes to integers in [0, limit), or to 0 if the limit is 0."""
    return (_shifted(draws, 33) * limit) >> 31


def uniform(keys_B: Tensor, shape: Sequence[int]) -> Tensor:
    """Return numbers that are uniform on [0, 1), (B, *shape) float32, with 24 random bits each."""
    n = math.prod(shape)
    return _by_parts(keys_B, lambda keys: _shifted(hashed(keys, 0, n), 40).float() * 2.0**-24).view(-1, *shape)


def normal(keys_B: Tensor, shape: Sequence[int]) -> Tensor:
    """Return normally distributed numbers, (B, *shape) float32, by the Box-Muller transform."""
    n = math.prod(shape)
    half = -(-n // 2)

    def drawn(keys: Tensor) -> Tensor:
        radius, angle = ((_shifted(hashed(keys, 0, 2 * half), 11) + 1) * 2.0**-53).double().chunk(2, dim=1)
        length, turn = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        return torch.cat([length * turn.cos(), length * turn.sin()], dim=1)[:, :n].float()

    return _by_parts(keys_B, drawn).view(-1, *shape)


def _by_parts(keys_B: Tensor, drawn: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([drawn(part) for part in torch.split(keys_B, _KEYS_AT_ONCE)])


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

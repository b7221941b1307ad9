"""Counter-based random numbers: SplitMix64 and the distributions."""

from collections.abc import Iterator

import torch

from mixednuts_dist.norms.random import below, hashed, key_number, normal, uniform


def splitmix64(seed: int) -> Iterator[int]:
    """The generator as published, on Python's integers."""
    mask = (1 << 64) - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_hashes_are_splitmix64() -> None:
    keys = torch.tensor([key_number(0, "square", 7), key_number(1, "square", 7), -1])
    found = hashed(keys, 0, 6) & 0x7FFFFFFFFFFFFFFF
    for key, row in zip(keys.tolist(), found.tolist(), strict=True):
        sequence = splitmix64(key & ((1 << 64) - 1))
        assert row == [next(sequence) & 0x7FFFFFFFFFFFFFFF for _ in range(6)]
    assert torch.equal(hashed(keys, torch.tensor([4, 4, 4]), 2), hashed(keys, 0, 6)[:, 4:])
    assert int(next(splitmix64(1234567))) == 6457827717110365317  # by the reference implementation


def test_integers_are_uniform() -> None:
    draws = hashed(torch.tensor([key_number("uniform")]), 0, 60_000)[0]
    counts = below(draws, torch.tensor(6)).bincount(minlength=6)
    assert counts.sum() == 60_000
    assert float((counts - 10_000).abs().max()) < 500
    assert abs(int((draws >= 0).sum()) - 30_000) < 700
    assert int(below(draws, torch.tensor(0)).abs().max()) == 0


def test_floats_have_the_moments_of_their_distributions() -> None:
    keys = torch.tensor([key_number("moments", i) for i in range(40)])
    flat, bell = uniform(keys, (3, 33, 31)), normal(keys, (3, 33, 31))
    assert flat.shape == bell.shape == (40, 3, 33, 31)
    assert 0 <= float(flat.min()) < 1e-4
    assert 1 - 1e-4 < float(flat.max()) < 1
    for values, moments in ((flat, (1 / 2, 1 / 3, 1 / 4, 1 / 5)), (bell, (0.0, 1.0, 0.0, 3.0))):
        for power, moment in enumerate(moments, start=1):
            assert abs(float(values.double().pow(power).mean()) - moment) < 0.05
    assert 4 < float(bell.abs().max()) < 9
    neighbors = torch.stack([bell[:-1].flatten(), bell[1:].flatten()])
    assert abs(float(neighbors.corrcoef()[0, 1])) < 0.02

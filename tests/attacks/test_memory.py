"""The batch size that fits is found by trying."""

import pytest
import torch

from mixednuts_dist.attacks.memory import ON_CPU, largest_batch, tried_batch
from mixednuts_dist.attacks.victim import Victim

from .test_engine import ShortOfMemory


@pytest.mark.parametrize("room", [1, 3, 10, 40, 100, 10_000])
def test_the_largest_batch_fits_and_twice_of_it_does_not(victim, room: int) -> None:
    model, x, _ = victim(n=5)
    found = tried_batch(Victim.of(ShortOfMemory(model, room)), x, most=256)
    assert 1 <= found <= min(room, 256)
    assert found > min(room, 256) / 2


def test_no_room_at_all_is_an_error(victim) -> None:
    model, x, _ = victim(n=5)
    with pytest.raises(torch.OutOfMemoryError, match=r"one image of shape \(3, 8, 8\)"):
        tried_batch(Victim.of(ShortOfMemory(model, 0)), x)


def test_on_a_cpu_nothing_is_tried(victim) -> None:
    model, x, _ = victim(n=5)
    assert largest_batch(Victim.of(ShortOfMemory(model, 0)), x) == ON_CPU

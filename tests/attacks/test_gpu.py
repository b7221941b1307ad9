"""Every attack on a GPU: in each precision, compiled or not, with no round that waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mixednuts_dist.acceleration.precision import FastCopies
from mixednuts_dist.config.register import ATTACKS
from tests.helpers.card_bodies import memory_that_ends_loses_nothing, no_round_waits, results_are_those_of_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's imports warn
]


@pytest.mark.parametrize("attack", ATTACKS.names())
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("compile", [False, True])
def test_results_are_those_of_float32(attack: str, precision, compile: bool) -> None:
    results_are_those_of_float32(attack, FastCopies(precision, compile=compile), n=40)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attack", ATTACKS.names())
def test_no_round_waits_for_the_device(attack: str) -> None:
    no_round_waits(attack, waits_are_errors)


def test_memory_that_ends_loses_nothing() -> None:
    memory_that_ends_loses_nothing()

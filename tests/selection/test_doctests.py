"""The examples in the docstrings of the maths are true."""

import doctest
import importlib

import pytest

MODULES = [
    "mixing.clamps", "mixing.mixture", "mixing.transforms", "mixing.margins",
    "selection.choice", "selection.grid", "selection.selection",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"mixednuts_dist.{name}"))
    assert found.attempted > 0
    assert found.failed == 0

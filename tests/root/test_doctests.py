"""The examples in the docstrings of every module of the package are true."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import mixednuts_dist

PACKAGE = Path(mixednuts_dist.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    with torch.random.fork_rng(devices=[]):
        found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_examples_are_looked_for_in_every_room() -> None:
    assert len(MODULES) > 15
    assert {"attacks", "mixing", "norms", "selection"} <= {name.split(".")[1] for name in MODULES}

"""The examples in the docstrings of every module of the package are true."""

import doctest
import importlib
from pathlib import Path

import torch

import mixednuts_dist

PACKAGE = Path(mixednuts_dist.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_the_examples_hold() -> None:
    found = dict[str, doctest.TestResults]()
    for name in MODULES:
        module = importlib.import_module(name.removesuffix(".__init__"))
        with torch.random.fork_rng(devices=[]):
            found[name] = doctest.testmod(module)
    assert {name: results for name, results in found.items() if results.failed or not results.attempted} == {}
    assert {"attacks", "mixing", "norms", "selection"} <= {name.split(".")[1] for name in found}

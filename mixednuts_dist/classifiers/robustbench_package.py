"""The one place where third-party model libraries are imported; RobustBench's PyPI package needs help to import at all.

robustbench 1.1.1 imports `autoattack`, while it depends on pyautoattack, which is the same code under another name; it
imports pkg_resources, which setuptools dropped in version 81 (hence the pin); and its classes print what they build.
"""

import contextlib
import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ..errors import BaseClassifierError

_ALIASES = {"autoattack": "pyautoattack", "autoattack.state": "pyautoattack.state"}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No warnings and nothing on stdout from other people's imports and constructors."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def import_quietly(name: str) -> ModuleType:
    """Import a module of timm or torchvision, whose first import warns of what is deprecated in PyTorch."""
    with quietly():
        return importlib.import_module(name)


def import_robustbench(name: str = "robustbench") -> ModuleType:
    """Import robustbench or one of its modules.

    Raises:
        BaseClassifierError: where its dependencies are broken, with what to install.
    """
    try:
        importlib.import_module("autoattack")
    except ImportError:
        for alias, real in _ALIASES.items():
            sys.modules.setdefault(alias, import_quietly(real))
    try:
        return import_quietly(name)
    except ImportError as error:
        raise BaseClassifierError(
            f"{name} cannot be imported: {error}; it needs pkg_resources: pip install 'setuptools<81' pyautoattack"
        ) from error


def robustbench_file(relative: str) -> Path:
    """A data file of the package, found without importing it."""
    spec = importlib.util.find_spec("robustbench")
    if spec is None or not spec.submodule_search_locations:
        raise BaseClassifierError("robustbench is not installed: pip install robustbench")
    return Path(spec.submodule_search_locations[0]) / relative

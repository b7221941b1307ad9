"""`py:` and `callable:` URIs: a function in an importable module or in a file."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BaseClassifierError
from ..uris import split_factory


def find_function(target: str, role: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        BaseClassifierError: where the module cannot be imported, or has no such function (those it has are listed).
    """
    module_name, name = split_factory(target)
    module = _module(module_name, role)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise BaseClassifierError(f"{role}: {module_name} has no factory {name!r}; it has: {', '.join(found)}")
    return function  # type: ignore[no-any-return]


def source_of(function: Callable[..., Any]) -> bytes:
    """The source file that defines a function, empty where there is none."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return Path(file).read_bytes() if file else b""


def _module(name: str, role: str) -> ModuleType:
    try:
        return _module_from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ImportError as error:
        raise BaseClassifierError(f"{role}: cannot import {name!r}: {error}") from error


def _module_from_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once."""
    name = f"mixednuts_factory_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

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

import yaml

from ..errors import BaseClassifierError
from ..register import CLASSIFIERS
from ..uris import ResourceUri, split_factory


@CLASSIFIERS("py", describes="a function of yours that returns a torch module", order=6,
             forms=("py:package.module:factory", "py:path/to/file.py:factory"),
             target="factory", any_option=True)  # fmt: skip
def load_factory(uri: ResourceUri) -> Any:
    """What the function returns; the URI's options are its keyword arguments."""
    return find_function(uri.target)(**keyword_arguments(uri))


def keyword_arguments(uri: ResourceUri) -> dict[str, Any]:
    """The options, their values read as YAML: `?bias=2.5&names=[a,b]`.

    Raises:
        BaseClassifierError: for a value that is no YAML.
    """
    try:
        return {key: yaml.safe_load(value) for key, value in uri.options}
    except yaml.YAMLError as error:
        raise BaseClassifierError(
            f"an option's value is not readable as YAML: {' '.join(str(error).split())}"
        ) from error


def find_function(target: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        BaseClassifierError: where the module cannot be imported, or has no such function (those it has are listed).
    """
    module_name, name = split_factory(target)
    module = _module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise BaseClassifierError(f"{module_name} has no factory {name!r}; it has: {', '.join(found)}")
    return function  # type: ignore[no-any-return]


def source_of(function: Callable[..., Any]) -> bytes:
    """The source file that defines a function, empty where there is none."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return Path(file).read_bytes() if file else b""


def _module(name: str) -> ModuleType:
    try:
        return _module_from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ImportError as error:
        raise BaseClassifierError(f"cannot import {name!r}: {error}") from error


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

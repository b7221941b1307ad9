"""MixedNUTS (Bai et al., TMLR 2024) on a Ray cluster: minimum-margin attacks, Algorithm 1, adaptive AutoAttack.

`__init__.pyi` lists the public names and their modules. They are imported on first use, so that importing the package
costs nothing and neither starts nor imports Ray.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "1.0.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: f".{node.module}" for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

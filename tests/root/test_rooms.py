"""The structure of the package: imports go up the list of layers, and importing the package costs nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mixednuts_dist

PACKAGE = Path(mixednuts_dist.__file__).parent
LAYERS = [
    {"errors", "config", "__init__"},
    {"mixing", "norms"},
    {"selection", "acceleration"},
    {"attacks"},
    {"certification"},
    {"images", "classifiers", "storage"},
    {"distributed"},
    {"stages"},
    {"reports", "studies", "deployment"},
    {"pipeline", "api", "cli", "benchmarks", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the imports and strings of a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield (module, is ours) of each import; ours relative to the package."""
    here = [*path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            ours = module.split(".")[0] == PACKAGE.name
            yield (module.removeprefix(f"{PACKAGE.name}."), True) if ours else (module, False)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - (node.level - 1)]
            full = [*base, *(node.module or "").split(".")]
            names = [part for part in full if part]
            yield from ((".".join(names), True),) if names else ((alias.name, True) for alias in node.names)


def test_no_module_of_the_package_is_imported_by_a_string() -> None:
    """The register imports the homes of its entries, which are in the package that the register names."""
    ours = re.compile(rf"({PACKAGE.name}\.|\.+)({'|'.join([*LEVEL, *(path.stem for path in SOURCES)])})\b[\w.:]*")
    strings = [(path.name, node.value) for path in SOURCES for node in nodes(path) if isinstance(node, ast.Constant)]
    assert [each for each in strings if isinstance(each[1], str) and ours.fullmatch(each[1])] == []
    assert (
        ours.fullmatch("..deployment.loading")
        and ours.fullmatch(".clamps")
        and ours.fullmatch("mixednuts_dist.mixing.margins:signed_margin")
    )


def test_imports_only_go_up() -> None:
    """The lazy names of the package's `__init__.py` may come from anywhere."""
    assert {room_of(path) for path in SOURCES} <= set(LEVEL), "add the new package to LAYERS"
    offenders = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in SOURCES
        if path != PACKAGE / "__init__.py"
        for module, ours in imports(path)
        if ours and LEVEL[module.split(".")[0]] > LEVEL[room_of(path)]
    ]
    assert offenders == []


def test_no_two_modules_import_each_other() -> None:
    """Directly or through others; imports inside functions count."""
    modules = (path.relative_to(PACKAGE).with_suffix("").parts for path in SOURCES)
    names = {
        ".".join(parts).removesuffix("__init__").rstrip("."): path for parts, path in zip(modules, SOURCES, strict=True)
    }
    graph = {
        name: {
            found
            for module, ours in imports(path)
            if ours
            for found in (module, *(f"{module}.{name}" for name in names_imported(path, module)))
            if found in names and found != name
        }
        for name, path in names.items()
        if name
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules


def names_imported(path: Path, module: str) -> set[str]:
    """Return the names that `from module import ...` imports in the file; some are modules."""
    last = module.rpartition(".")[2]
    return {
        alias.name
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or last).rpartition(".")[2] == last
        for alias in node.names
    }


def test_ray_is_imported_in_one_room_only() -> None:
    for path in SOURCES:
        for module, ours in imports(path):
            if module.split(".")[0] == "ray" and not ours:
                relative = str(path.relative_to(PACKAGE))
                assert relative.startswith("distributed/"), f"{relative} imports {module}"


def test_importing_the_package_imports_neither_ray_nor_torch() -> None:
    code = "import sys, mixednuts_dist, mixednuts_dist.cli; print([m for m in ('ray', 'torch') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert [name for name in mixednuts_dist.__all__ if not getattr(mixednuts_dist, name).__doc__] == []


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(AttributeError, match="LogitTransform"):
        _ = mixednuts_dist.LogitTranform

"""The structure of the package: imports go up the list of layers, and no loader may unpickle."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mixednuts_dist

PACKAGE = Path(mixednuts_dist.__file__).parent
LAYERS = [
    {"errors", "config", ""},  # "": the package's __init__.py
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
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
NODES = {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in SOURCES.items()}


def layer(module: str) -> int:
    return LEVEL[f"{module}.".split(".")[1]]


def imported(name: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, those in functions included."""
    package = name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in NODES[name]:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found = [base] if set(names).isdisjoint(SOURCES) else names
        else:
            continue
        yield from (module for module in found if module in SOURCES)


def test_imports_only_go_up() -> None:
    """The lazy names of the package's `__init__.py` may come from anywhere."""
    offenders = [
        f"{name} imports {module}"
        for name in SOURCES
        if name != PACKAGE.name
        for module in imported(name)
        if layer(module) > layer(name)
    ]
    assert offenders == []


def test_no_two_modules_import_each_other() -> None:
    graph = {name: set(imported(name)) - {name} for name in SOURCES if name != PACKAGE.name}
    assert sum(map(len, graph.values())) > 200
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules


def test_no_module_of_the_package_is_imported_by_a_string() -> None:
    """The register imports the homes of its entries, which are in the package that the register names."""
    stems = [name.rpartition(".")[2] for name in SOURCES]
    ours = re.compile(rf"({PACKAGE.name}\.|\.+)({'|'.join([*filter(None, LEVEL), *stems])})\b[\w.:]*")
    strings = [(name, node.value) for name in SOURCES for node in NODES[name] if isinstance(node, ast.Constant)]
    assert [each for each in strings if isinstance(each[1], str) and ours.fullmatch(each[1])] == []
    assert all(map(ours.fullmatch, ("..deployment.loading", ".clamps", f"{PACKAGE.name}.mixing.margins:signed_margin")))


def test_no_loader_may_unpickle() -> None:
    """Ruff bans pickle, eval and the like. By default, torch.load and np.load read no objects."""
    unsafe = {("weights_only", False), ("allow_pickle", True), ("trust_remote_code", True)}
    keywords = [(name, node) for name in SOURCES for node in NODES[name] if isinstance(node, ast.keyword)]
    assert [name for name, node in keywords if (node.arg, getattr(node.value, "value", None)) in unsafe] == []


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert [name for name in mixednuts_dist.__all__ if not getattr(mixednuts_dist, name).__doc__] == []


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(AttributeError, match="LogitTransform"):
        _ = mixednuts_dist.LogitTranform

"""Nothing that the package reads can run code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mixednuts_dist

SOURCES = sorted(Path(mixednuts_dist.__file__).parent.rglob("*.py"))
FORBIDDEN = {
    *("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "shelve.open"),
    *(f"{module}.{name}" for module in ("pickle", "cloudpickle", "dill", "marshal") for name in ("load", "loads")),
    "pickle.Unpickler",
}
REQUIRED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe(source: str) -> list[str]:
    """The calls in `source` that could run what they read."""
    found = []
    for name, call in calls(source):
        keyword, value = REQUIRED.get(name, ("", None))
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        if name in FORBIDDEN or (keyword and given.get(keyword) != str(value)):
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


# The pipes between a driver and the worker processes that it has started itself; nothing of a file or a network.
OWN_PIPES = {"distributed/local.py": ("pickle.load(requests)", "pickle.load(self._answers)", "pickle.loads(content)")}


def test_no_call_can_run_what_it_reads() -> None:
    package = Path(mixednuts_dist.__file__).parent
    names = {path.relative_to(package).as_posix(): path for path in SOURCES}
    offenders = [
        f"{name}, {call}"
        for name, path in names.items()
        for call in unsafe(path.read_text())
        if call.partition(": ")[2] not in OWN_PIPES.get(name, ())
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "line", ["torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "yaml.load(f, L)", "pickle.loads(b)"]
)
def test_unsafe_calls_are_seen(line: str) -> None:
    assert unsafe(line)

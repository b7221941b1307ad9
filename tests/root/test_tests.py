"""Rules for the tests themselves."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
LONGEST = 420  # seconds that a test may ask for: a test that hangs must not lose the results of the others


def test_no_test_module_is_imported() -> None:
    """Shared code is in `tests/helpers/`."""
    offenders = [
        f"{name}:{node.lineno}"
        for name, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.level or re.match(r"tests\.(?!helpers\b)", node.module or ""))
    ]
    assert offenders == []


def test_no_test_asks_for_more_than_seven_minutes() -> None:
    offenders = [
        f"{name}: {found[0]}"
        for name, source in SOURCES.items()
        for found in re.finditer(r"mark\.timeout\((\d+)\)", source)
        if int(found[1]) > LONGEST
    ]
    assert offenders == []

"""The linter, the formatter and the type checker are part of the one test command."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = {
    "ruff check": ["ruff", "check", "--no-cache", "."],
    "ruff format": ["ruff", "format", "--no-cache", "--check", "."],
}


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, id=name) for name, command in CHECKS.items()),
        pytest.param(["mypy"], id="mypy", marks=pytest.mark.slow),
    ],
)
def test_check_passes(command: list[str]) -> None:
    found = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr

"""The linter, the formatter and the type checker are part of the one test command."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = {
    "ruff check": ["ruff", "check", "--no-cache", "."],
    "ruff format": ["ruff", "format", "--no-cache", "--check", "."],
    "mypy": ["mypy"],
}


@pytest.mark.parametrize("command", CHECKS.values(), ids=CHECKS.keys())
def test_check_passes(command: list[str]) -> None:
    found = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr

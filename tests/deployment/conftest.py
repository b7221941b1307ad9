"""One finished run for the whole room; tests leave it as they found it, or work on a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.runs import Finished


@pytest.fixture(scope="session")
def run_folder(tiny_run: Finished) -> Path:
    """The folder of a run that went through all stages."""
    return tiny_run.folder


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy that a test may damage."""

    def copy() -> Path:
        shutil.copytree(run_folder.parents[1], tmp_path / run_folder.parents[1].name)
        return tmp_path / run_folder.relative_to(run_folder.parents[2])

    return copy


@pytest.fixture
def edited(copied: Callable[[], Path]) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Makes a copy with another `run.yaml`."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        folder = copied()
        content = yaml.safe_load((folder / "run.yaml").read_text())
        change(content)
        (folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return folder

    return edit

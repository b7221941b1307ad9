"""One finished run for the whole package; tests leave it as they found it, or work on a copy."""

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
def edited(copied_run: Finished) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Makes a copy with another `run.yaml`."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        folder = copied_run.folder
        content = yaml.safe_load((folder / "run.yaml").read_text())
        change(content)
        (folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return folder

    return edit

"""One finished run for the whole room; tests leave it as they found it, or work on a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.config import parse_config
from tests.conftest import tiny_content

OLD_RUN = str(Path(__file__).with_name("old_run"))  # of release 0.1.0, results version 2


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, ray_session: Any) -> Path:
    """The folder of a run that went through all stages."""
    config = parse_config(tiny_content(tmp_path_factory.mktemp("deployed")))
    pipeline.run(config, session=ray_session)
    return Path(config.storage) / config.run_id()


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy that a test may damage."""

    def copy() -> Path:
        return Path(shutil.copytree(run_folder, tmp_path / run_folder.name))

    return copy

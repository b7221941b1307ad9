"""A finished run for each module of tests: what one does in its storage does not reach another."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.config import RunConfig, parse_config
from tests.conftest import tiny_content


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ray_session: Any) -> tuple[RunConfig, Path, dict[str, Any]]:
    """(config, its folder, its JSON) of a run that nothing disturbed; tests leave it as they found it."""
    config = parse_config(tiny_content(tmp_path_factory.mktemp("finished")))
    results = pipeline.run(config, session=ray_session)
    return config, Path(config.storage) / config.run_id(), results.to_json()

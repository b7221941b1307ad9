"""One tiny run for all studies, and their variants, computed in this process."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.studies.bench import Bench
from tests.helpers.runs import tiny_content


@pytest.fixture(scope="session")
def bench(local_executor: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """24 digits and the paper's search, which the studies are about; one variant goes through the pool too."""
    storage: Path = tmp_path_factory.mktemp("studies")
    content = tiny_content(storage)
    content["attack"] = {**content["attack"], "n_queries": 30}
    return Bench(parse_config(content), executor=local_executor)

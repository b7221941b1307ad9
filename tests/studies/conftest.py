"""One tiny run for all studies, and their variants, computed in this process."""

from typing import Any

import pytest

from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.studies.bench import Bench
from tests.helpers.runs import tiny_content


@pytest.fixture(scope="session")
def bench(local_executor: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """24 digits and the paper's search, which the studies are about; one variant goes through the pool too."""
    attack = {"n_iter": 8, "n_target_classes": 2, "n_queries": 30}
    return Bench(parse_config(tiny_content(tmp_path_factory.mktemp("studies"), attack=attack)), executor=local_executor)

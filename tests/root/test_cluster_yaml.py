"""cluster.yaml against Ray's own schema and resource checks, offline."""

from pathlib import Path
from typing import Any

import pytest
import yaml

PATH = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture
def content() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(PATH.read_text())
    return loaded


def validate(content: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(content))


def test_rays_launcher_accepts_it(content: dict[str, Any]) -> None:
    validate(content)


@pytest.mark.parametrize("key", ["max_wrokers", "idle_timeout"])
def test_the_check_would_see_an_unknown_key(content: dict[str, Any], key: str) -> None:
    with pytest.raises(Exception, match=key):
        validate({**content, key: 1})


def test_the_head_runs_no_attack_and_workers_start_from_none(content: dict[str, Any]) -> None:
    types = content["available_node_types"]
    head, worker = types[content["head_node_type"]], types["gpu_worker"]
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert worker["resources"]["GPU"] == 1
    assert worker["min_workers"] == 0
    assert 0 < worker["max_workers"] <= content["max_workers"]
    assert worker["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"

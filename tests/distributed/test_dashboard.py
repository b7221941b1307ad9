"""`jobs/grafana.json` shows what the code exports, and nothing that it does not."""

import contextlib
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from mixednuts_dist.distributed.ray_executor import DESCRIPTIONS, RayExecutor

DASHBOARD = Path(__file__).parents[2] / "jobs" / "grafana.json"


def test_the_dashboard_shows_every_exported_metric_and_no_other() -> None:
    content = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    variables = content["templating"]["list"]
    asked += [variable["query"] for variable in variables if variable["type"] == "query"]
    shown = {name for text in asked for name in re.findall(r"ray_[a-z_]+", text)}
    assert shown == {f"ray_mixednuts_{name}" for name in DESCRIPTIONS}
    for text in (text for text in asked if not text.startswith("label_values")):
        assert set(re.findall(r"(\w+)=~", text)) == {"run", "stage"}  # the tags that every count carries


@pytest.mark.alone
def test_ray_exports_every_metric_of_the_dashboard(ray_executor: RayExecutor) -> None:
    """Read the port that Prometheus reads; Ray exports every ten seconds."""
    ray_executor.export("a-run", "attack", {"images": 4, "broken": 1})
    content = json.loads(DASHBOARD.read_text())
    asked = set(re.findall(r"ray_mixednuts_[a-z_]+", json.dumps(content)))
    (node,) = ray.nodes()
    address, deadline = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", time.monotonic() + 120
    found: set[str] = set()
    while not asked <= found and time.monotonic() < deadline:
        time.sleep(1)
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
            lines = [line for line in answer.read().decode().splitlines() if 'run="a-run"' in line]
            found = {line.partition("{")[0] for line in lines if 'stage="attack"' in line}
    assert asked <= found
    assert any(re.match(r"ray_mixednuts_retries{.* 0(\.0)?$", line) for line in lines), "before the first retry"

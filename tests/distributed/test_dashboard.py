"""`jobs/grafana.json` shows what the code exports, and nothing that it does not."""

import json
import re
from pathlib import Path

from mixednuts_dist.distributed.metrics import DESCRIPTIONS

DASHBOARD = Path(__file__).parents[2] / "jobs" / "grafana.json"


def test_the_dashboard_shows_every_exported_metric_and_no_other() -> None:
    content = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in content["templating"]["list"]]
    shown = {name for text in asked for name in re.findall(r"ray_[a-z_]+", text)}
    assert shown == {f"ray_mixednuts_{name}" for name in DESCRIPTIONS}
    for text in asked[: len(content["panels"])]:
        assert set(re.findall(r"(\w+)=~", text)) == {"run", "stage"}  # the tags that every count carries


def test_the_dashboard_s_panels_are_told_apart() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(set(places))

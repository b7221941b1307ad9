"""docs/architecture.md is true: the functions of its walk exist in order, and its extensions run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.stages.runs import run_store
from mixednuts_dist.studies import study
from tests.helpers.runs import tiny_content

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SHOWN = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_walk_has_at_most_eight_functions_and_each_is_there() -> None:
    steps = re.findall(r"^(\d)\. `([\w/]+\.py): (\w+)`", PAGE, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 <= len(steps) <= 8
    for _, file, function in steps:
        assert f"def {function}(" in (ROOT / "mixednuts_dist" / file).read_text(), f"{file} has no {function}"


@pytest.mark.alone
def test_extensions_of_every_kind_run_from_the_attack_to_a_study(
    tmp_path: Path, ray_executor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the page's blocks unchanged, in the workers and in the trials of the search."""
    files = [tmp_path / f"mine_{i}.py" for i in range(len(SHOWN))]
    for file, text in zip(files, SHOWN, strict=True):
        file.write_text(text)
    content = tiny_content(
        tmp_path / "runs",
        extensions=[str(file) for file in files],
        data={"uri": "mirrored:24"},
        std="mirror:std",
        rob="mirror:rob",
        flip={},
    )
    content["search"] |= {"clamp": "cube", "criterion": "fewest", "tune": True}
    content["evaluate"] |= {"attacks": ["apgd-gap"]}
    config = parse_config(content)
    results = pipeline.run(config, executor=ray_executor)
    store = run_store(config)
    assert "apgd-gap" in json.dumps(json.loads(store.read("report/results.json")))
    assert b'id="chart-images"' in store.read("report/index.html")
    selected = json.loads(store.read("search/selected.json"))["result"]
    assert selected["criterion"] == "fewest"
    assert {entry["clamp"] for entry in selected["entries"]} == {"cube"}
    assert results.n_images == 24
    assert [row.classifier for row in results.stages] == ["mixed, flip"]
    outcome = study.run(config, "images", executor=ray_executor)["images"]
    assert outcome.findings == ("There are 24 images.",)
    assert "There are 24 images." in capsys.readouterr().out

"""What docs/inside.md says of the code is true: its walk's functions exist in order, and its extension is one."""

import re
from pathlib import Path

import torch

from mixednuts_dist.config import parse_config
from mixednuts_dist.register import CLAMPS
from tests.conftest import tiny_content

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "inside.md").read_text()


def test_the_walk_has_at_most_eight_functions_and_each_is_there() -> None:
    steps = re.findall(r"^(\d)\. `([\w/]+\.py): (\w+)`", PAGE, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 <= len(steps) <= 8
    for _, file, function in steps:
        assert f"def {function}(" in (ROOT / "mixednuts_dist" / file).read_text(), f"{file} has no {function}"


def test_the_clamp_of_the_page_can_be_configured(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "cube.py").write_text(shown)
    content = tiny_content(tmp_path / "runs", extensions=[str(tmp_path / "cube.py")])
    config = parse_config({**content, "search": {**content["search"], "clamp": "cube"}})
    assert config.search.clamp == "cube"
    assert CLAMPS.get("cube")(torch.tensor([2.0])).item() == 8

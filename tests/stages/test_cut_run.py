"""A run whose classifiers round their pixels: the cut is found, attacked through, counted both ways and resumed."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import BaseClassifierError
from mixednuts_dist.stages.runs import open_run
from tests.helpers.runs import tiny_content

ROUNDED = """
import torch
from mixednuts_dist import load_classifier

class Round(torch.nn.Module):
    def forward(self, x):
        return (32 * x).round() / 32

class ByHand(torch.nn.Module):
    def forward(self, x):
        return x + (Round()(x) - x).detach()

class Rounded(torch.nn.Module):
    def __init__(self, role, first):
        super().__init__()
        self.first, self.net = first, load_classifier(f"demo:{role}", role)

    def forward(self, x):
        return self.net(self.first(x))

class Shrunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(16, 10)

    def forward(self, x):
        return self.last((x[:, :, ::2, ::2] > 0.5).float().flatten(1))

def std():
    return Rounded("std", Round()).eval()

def rob():
    return Rounded("rob", Round()).eval()

def std_by_hand():
    return Rounded("std", ByHand()).eval()

def rob_by_hand():
    return Rounded("rob", ByHand()).eval()

def other_shape():
    return Shrunk().eval()
"""


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "rounded.py").write_text(ROUNDED)
    uris = {role: f"py:{folder}/rounded.py:{role}" for role in ("std", "rob")}
    evaluate = {"attacks": ["apgd-ce"], "n_iter": 8}
    return tiny_content(folder / "runs", **{**uris, "evaluate": evaluate, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    config = parse_config(content(tmp_path_factory.mktemp("cut")))
    return config, pipeline.run(config, executor=DebugExecutor())


def test_the_table_has_both_numbers_and_the_modules(run: tuple[Any, Any]) -> None:
    config, results = run
    table = results.tables["gradients that are cut, and attacks through them"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["std", "rob", "mixed"]
    assert rows["rob"][0] == "rob.first"
    assert rows["mixed"][0] == "std.first, rob.first"
    for _, before, after in rows.values():
        assert after.correct <= before.correct
    assert rows["rob"][2].correct < rows["rob"][1].correct - 3, "the plain attack was blind"
    assert results.row("rob").robust.correct == rows["rob"][2].correct
    assert results.row("mixed").robust.correct == rows["mixed"][2].correct
    assert [step.step for step in results.survival][-1] == "bpda"
    page = (Path(config.storage) / config.run_id() / "report" / "index.html").read_text()
    assert "gradients that are cut" in page


def test_nine_tenths_of_the_drop_of_a_backward_pass_written_by_hand(run: tuple[Any, Any], tmp_path: Path) -> None:
    _, results = run
    uris = {role: f"py:{tmp_path}/rounded.py:{role}_by_hand" for role in ("std", "rob")}
    by_hand = pipeline.run(parse_config(content(tmp_path, **uris)), executor=DebugExecutor())
    assert not by_hand.tables
    for name in ("std", "rob", "mixed"):
        found, expected = results.row(name), by_hand.row(name)
        assert found.clean.correct == expected.clean.correct
        drop = expected.clean.correct - expected.robust.correct
        assert found.clean.correct - found.robust.correct >= 0.9 * drop > 0


def test_a_lost_partition_comes_back_with_the_same_rows(run: tuple[Any, Any]) -> None:
    config, _ = run
    folder = Path(config.storage) / config.run_id()
    before = {}
    for stage, column in (("attack", "rob_broken_before_bpda"), ("evaluate", "survived_bpda")):
        lost = sorted((folder / stage).glob("part-*.parquet"))[-1]
        before[lost] = pq.read_table(lost)
        assert column in before[lost].column_names
        lost.unlink()
    pipeline.run(config, executor=DebugExecutor())
    for lost, rows in before.items():
        assert pq.read_table(lost).equals(rows)


def test_bpda_false_leaves_it_out_under_another_run_id(run: tuple[Any, Any], tmp_path: Path) -> None:
    config, _ = run
    off = parse_config(content(tmp_path, std=None, bpda=False, attack={"method": "square", "n_queries": 5}))
    assert off.run_id() != parse_config({**off.model_dump(mode="json"), "bpda": True}).run_id()
    assert open_run(off).inputs.cuts == {}
    with pytest.raises(BaseClassifierError, match=r"rob=.* has no gradient; set attack.method: square"):
        open_run(parse_config(content(tmp_path, std=None, bpda=False)))
    kept = yaml.safe_load((Path(config.storage) / config.run_id() / "run.yaml").read_text())["inputs"]
    assert kept["cuts"]["rob"] == [{"module": "first", "child": "", "after": "", "obstacle": ""}]


def test_code_between_other_shapes_is_named_with_the_reason(tmp_path: Path) -> None:
    config = parse_config(content(tmp_path, rob=f"py:{tmp_path}/rounded.py:other_shape"))
    words = (
        r"has no gradient \(the classifier: its input is 1 x 8 x 8 and its output 10, by code that is no module\); set "
        r"attack.method: square"
    )
    with pytest.raises(BaseClassifierError, match=words):
        open_run(config)


def test_a_classifier_that_cuts_nothing_keeps_its_rows_and_run_id(tmp_path: Path) -> None:
    config = parse_config(tiny_content(tmp_path))
    opened = open_run(config)
    assert (opened.inputs.cuts, "cuts" in opened.inputs.checksums) == ({}, False)
    assert "bpda" not in config.determinants()

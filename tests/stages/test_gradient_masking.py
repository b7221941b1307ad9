"""Classifiers that round pixels: a run rejects such a `rob`, reports such a `std`, and takes `straight_through`."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.stages.runs import open_run
from tests.helpers.runs import tiny_content

ROUNDED = """
import torch
from mixednuts_dist import load_classifier, straight_through

class Round(torch.nn.Module):
    def forward(self, x):
        return (32 * x).round() / 32

class ByHand(torch.nn.Module):
    def forward(self, x):
        return x + (Round()(x) - x).detach()

def factory(role, first, last=lambda net: net):
    return lambda: last(torch.nn.Sequential(first(), load_classifier(f"demo:{role}", role)).eval())

std = factory("std", Round)
std_through, rob_through = (factory(role, Round, straight_through) for role in ("std", "rob"))
std_by_hand, rob_by_hand = (factory(role, ByHand) for role in ("std", "rob"))
"""


def content(folder: Path, **roles: str) -> dict[str, Any]:
    (folder / "rounded.py").write_text(ROUNDED)
    uris = {role: f"py:{folder}/rounded.py:{name}" for role, name in roles.items()}
    return tiny_content(folder / "runs", **{**uris, "evaluate": {"attacks": ["apgd-ce"], "n_iter": 8}})


@pytest.mark.slow
def test_straight_through_runs_match_a_manual_bpda(tmp_path: Path) -> None:
    through, by_hand = (
        pipeline.run(parse_config(content(tmp_path, std=f"std_{how}", rob=f"rob_{how}")), executor=DebugExecutor())
        for how in ("through", "by_hand")
    )
    assert not any("straight_through" in finding for finding in through.notes)
    for name in ("std", "rob", "mixed"):
        found, expected = through.row(name), by_hand.row(name)
        assert found.clean.correct == expected.clean.correct
        drop = expected.clean.correct - expected.robust.correct
        assert found.clean.correct - found.robust.correct >= 0.9 * drop > 0


def test_a_masked_std_is_reported(tmp_path: Path) -> None:
    config = parse_config(content(tmp_path, std="std", rob="rob_through"))
    results = pipeline.run(config, executor=DebugExecutor())
    assert open_run(config).inputs.masked == ["std"]
    (finding,) = (each for each in results.notes if "straight_through" in each)
    assert finding.startswith("The gradient of std is zero")

"""Odd pairs: the same classifier twice, constant logits, one class, active dropout, 1,000 classes, equal images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import BaseClassifierError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages.runs import open_run
from tests.helpers.runs import MakeConfig
from tests.helpers.touchy_classifiers import table

FACTORIES = """
import torch
from torch import nn
from mixednuts_dist.classifiers.factories import demo_rob

class Constant(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.logits = nn.Parameter(torch.arange(float(n_classes)))

    def forward(self, x):
        return self.logits.expand(len(x), -1) + 0 * x.flatten(1).sum(dim=1, keepdim=True)

constant, one_class = (lambda: Constant(10)), (lambda: Constant(1))

class Dropout(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)

def dropping():
    return nn.Sequential(Dropout(), demo_rob())

def linear(seed):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1000))
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(1000, 64, generator=torch.Generator().manual_seed(seed)))
        net[1].bias.zero_()
    return net

wide_std, wide_rob = (lambda: linear(1)), (lambda: linear(2))
"""


def odd(folder: Path, name: str) -> str:
    """Return the URI of one of these factories."""
    (folder / "odd.py").write_text(FACTORIES)
    return f"py:{folder / 'odd.py'}:{name}"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("constant", "constant|gradient"),
        ("one_class", "class"),
        ("dropping", r"Average over its draws with evaluate\.eot=20"),
    ],
)
def test_unusable_rob_raises_in_one_line(tiny: MakeConfig, tmp_path: Path, name: str, told: str) -> None:
    config = tiny(rob=odd(tmp_path, name))
    with pytest.raises(BaseClassifierError, match=told) as refused:
        open_run(config)
    assert "\n" not in str(refused.value)
    assert not list(Path(config.storage).rglob("part-*.parquet"))


def results(config: RunConfig) -> dict[str, Any]:
    return pipeline.run(config, executor=DebugExecutor()).to_json()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("std", ["demo:rob", "constant"])
def test_equal_or_constant_std_keeps_robust_images(tiny: MakeConfig, tmp_path: Path, std: str) -> None:
    found = results(tiny(std=std if ":" in std else odd(tmp_path, std), data={"uri": "digits", "n": 8}))["accuracy"]
    assert found["mixed"]["clean"] == found["rob"]["clean"]
    assert found["mixed"]["robust"]["correct"] >= found["rob"]["robust"]["correct"] > 0
    if std == "constant":
        assert found["std"]["robust"] == found["std"]["clean"]


@pytest.mark.usefixtures("no_pictures")
def test_1000_classes_and_equal_images(tiny: MakeConfig, tmp_path: Path) -> None:
    """Two images four times each, labeled with the classes that `rob` predicts."""
    images = open_dataset("digits").read(0, 2)[0].repeat(4, 1, 1, 1)
    std, rob = (load_classifier(odd(tmp_path, name), "rob")(images).argmax(dim=1) for name in ("wide_std", "wide_rob"))
    np.savez(tmp_path / "equal.npz", images=images.numpy(), labels=rob.numpy())
    data, threat = {"uri": f"npz:{tmp_path / 'equal.npz'}"}, {"eps": 0.002}
    config = tiny(std=odd(tmp_path, "wide_std"), rob=odd(tmp_path, "wide_rob"), data=data, threat=threat)
    found = results(config)["accuracy"]
    assert found["rob"]["clean"]["correct"] == 8
    assert found["std"]["clean"]["correct"] == int((std == rob).sum())
    logits = table(config)["rob_clean"]
    assert len(logits[0]) == 1000
    assert logits == logits[:2] * 4

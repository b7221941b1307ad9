"""The stage in examples/corruptions.py runs as an extension and equals plain forward passes."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixednuts_dist import pipeline
from mixednuts_dist.config.register import STAGES, load_extensions
from mixednuts_dist.deployment.loading import read_run
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.stages.stage import stage_of
from tests.helpers.runs import MakeConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "corruptions.py"
N = 24
NAMES = ["noise", "contrast"]


def corrupted_digits(folder: Path) -> None:
    """Store 24 digits with noise and with less contrast, each at five severities."""
    pixels = (open_dataset("digits").read(0, N)[0][:, 0] * 255).round().numpy()
    rng = np.random.default_rng(0)
    made = {
        "noise": [pixels + rng.normal(0, 8 * s, pixels.shape) for s in range(1, 6)],
        "contrast": [127 + (pixels - 127) * (1 - 0.17 * s) for s in range(1, 6)],
    }
    for name, copies in made.items():
        np.save(folder / f"{name}.npy", np.concatenate(copies).round().clip(0, 255).astype(np.uint8))


@pytest.mark.usefixtures("no_pictures")
def test_the_example_equals_plain_forward_passes(tiny: MakeConfig, tmp_path: Path, local_executor: Any) -> None:
    corrupted_digits(tmp_path)
    config = tiny(extensions=[str(EXAMPLE)], corruptions={"folder": str(tmp_path), "names": NAMES})
    results = pipeline.run(config, executor=local_executor)
    opened, stage = open_run(config), stage_of(config, "corruptions")
    rows = stage.rows(opened, NAMES)
    mixed = read_run(opened.store.uri, trust_code=True).classifier()
    y = open_dataset("digits").read(0, N)[1]
    for name in NAMES:
        images_SNCHW = torch.from_numpy(np.load(tmp_path / f"{name}.npy")).float().div(255).reshape(5, N, 1, 8, 8)
        for severity, x in enumerate(images_SNCHW):
            for place, model in enumerate((mixed.std, mixed.rob, mixed)):
                assert torch.equal(rows[name][:, severity, place], model(x).argmax(dim=1) == y)
    every = torch.stack([rows[name][..., 2].all(dim=1) for name in NAMES]).all(dim=0)
    assert results.to_json()["stages"]["mixed, corrupted"]["robust"]["correct"] == int(every.sum())
    (table,) = (table for title, table in results.tables.items() if title == "common corruptions")
    assert [row[0] for row in table.rows] == ["std", "rob", "mixed"]
    assert table.rows[0][-1] in (100.0, None)  # relative to itself; None without a mistake


def test_mean_corruption_error_is_relative_to_the_reference() -> None:
    load_extensions([str(EXAMPLE)])
    example = sys.modules[STAGES.get("corruptions").__module__]
    assert example.mean_corruption_error([0.25, 0.75], [0.5, 0.5]) == 100.0
    assert example.mean_corruption_error([0.25, 0.75], [0.5, 0.0]) is None

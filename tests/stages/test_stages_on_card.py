"""Every stage on a simulated GPU: no mixed devices, and the rows that a CPU writes."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.certification import smoothing
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from tests.helpers.runs import tiny_content
from tests.helpers.simulated_card import SimulatedCard

TINY = {"n_iter": 3, "n_target_classes": 1, "n_queries": 5}
SMOOTHING = {"n": 40, "n_choose": 10, "radii": [0.1], "alphas": [1, 0.8]}
RUNS = {
    "attack, search, refinement, evaluate": {"search": {"beta": 0.9, "rounds": 1, "tune": False}},
    "individual": {"individual": True},
    "certify": {"certify": SMOOTHING},
    "random classifiers": {"evaluate": {"version": "rand", "n_iter": 2, "eot": 2}, "std": None, "search": None},
}


def stored(folder: Path, changes: dict[str, Any], num_gpus: int) -> dict[str, pa.Table]:
    """Return the rows of every stage of a run, by the path of their partition without the hash."""
    content = tiny_content(folder, **{"evaluate": {"attacks": ["apgd-ce", "square"], **TINY}, **changes})
    content = {key: value for key, value in content.items() if value is not None}
    content |= {"data": {"uri": "digits", "n": 8}, "compute": {"num_gpus": num_gpus, "batch_size": 8}}
    pipeline.run(parse_config(content), executor=DebugExecutor())
    parts = sorted(folder.glob("*/*/*/part-*.parquet"))
    return {f"{part.parents[1].name}/{part.parent.name}/{part.name}": pq.read_table(part) for part in parts}


@pytest.mark.parametrize("name", RUNS)
def test_stages_on_a_gpu_write_the_rows_of_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A simulated GPU has no generator, so the noise of certificates comes from the CPU.
    drawn = smoothing._noise_block
    monkeypatch.setattr(smoothing, "_noise_block", lambda x, name: drawn(x.cpu(), name).to(x.device))
    expected = stored(tmp_path / "cpu", RUNS[name], 0)
    with ExitStack() as stack:
        card = stack.enter_context(SimulatedCard())
        found = stored(tmp_path / "gpu", RUNS[name], 1)
        assert card.waits
    assert found.keys() == expected.keys()
    assert found
    for path, table in found.items():
        for column, here, there in zip(table.column_names, expected[path].columns, table.columns, strict=True):
            values = here.to_pylist(), there.to_pylist()
            if pa.types.is_floating(here.type):
                assert np.allclose(*(np.array(each, float) for each in values), atol=1e-3, equal_nan=True), column
            elif pa.types.is_boolean(here.type) or pa.types.is_integer(here.type):
                assert values[0] == values[1], column

"""A tiny configuration, finished runs, the partitions that they computed and the rows that they stored."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.distributed.executor import Executor, PoolSettings
from mixednuts_dist.stages.progress import RunProgress
from mixednuts_dist.stages.runs import reopen_run
from mixednuts_dist.stages.stage import stage_of
from mixednuts_dist.storage.partitions import rows_folder
from mixednuts_dist.storage.records import PartitionSummary

MakeConfig = Callable[..., RunConfig]  # the fixture `tiny` is one


class Finished(NamedTuple):
    """A finished run: its configuration, its folder, and its results as JSON."""

    config: RunConfig
    folder: Path
    results: dict[str, Any]


class MainJob(NamedTuple):
    """The README's main job, run once for the whole suite."""

    results: dict[str, Any]
    storage: str
    stderr: str


def tiny_file(folder: Path, /, **changes: Any) -> Path:
    """Write the tiny configuration as `tiny.yaml`, with the storage `folder/runs`."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_content(folder / "runs", **changes)))
    return path


def tiny_content(storage: Path, /, **changes: Any) -> dict[str, Any]:
    """24 digits, a few iterations: seconds on one core."""
    content: dict[str, Any] = {
        "name": "tiny",
        "data": {"uri": "digits", "n": 24},
        "std": "demo:std",
        "rob": "demo:rob",
        "threat": {"eps": 0.15},
        "partition_size": 8,
        "precision": "fp32",  # what is fastest on a loaded machine is luck
        "attack": {"n_iter": 8, "n_target_classes": 2},
        "search": {
            "beta": 0.9,
            "betas": [1.0, 0.9, 0.5],
            "scales": [0.5, 5.0],
            "powers": [1.0, 3.0],
            "biases": [-0.5, 0.0],
            "rounds": 0,  # they are in tests/stages/test_rounds.py
            "tune": False,  # tests/distributed/test_tuning.py
        },
        "evaluate": {"n_iter": 5, "n_target_classes": 2, "n_queries": 20},
        "storage": str(storage),
        "compute": {"num_workers": 2},
    }
    return {**content, **changes}


def with_key(content: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of a configuration with this value of the key `path`, whose parts are joined by dots."""
    node = changed = copy.deepcopy(content)
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return changed


def certified_content(storage: Path, /, **changes: Any) -> dict[str, Any]:
    """The tiny configuration with a certify stage; `certify` replaces keys of that stage."""
    certify = {"n": 400, "n_choose": 20, "radii": [0.1, 0.25], "alphas": [1, 0.8]}
    return tiny_content(storage, **{"name": "certified", "compute": {"batch_size": 64}, "certify": certify, **changes})


class Watcher(RunProgress):
    """Remembers which partitions were computed."""

    def __init__(self) -> None:
        self.computed: list[tuple[str, int]] = []
        self.messages: dict[str, str] = {}

    def partition_done(self, summary: PartitionSummary) -> None:
        self.computed.append((summary.stage, summary.partition))

    def stage_finished(self, stage: str, message: str) -> None:
        self.messages[stage] = message


class NoRay(Executor):
    """An executor that must not be needed: without workers, and with nothing that could start any."""

    def workers(self, compute: ComputeConfig) -> PoolSettings:  # noqa: ARG002
        raise AssertionError("Ray was started although there was nothing to do")


def rows(folder: Path, stage: str, columns: Sequence[str]) -> dict[int, list[Any]]:
    """sample_id -> the bits of its row, over all partitions."""
    found: dict[int, list[Any]] = {}
    for path in sorted(rows_in(folder, stage).glob("part-*.parquet")):
        table = pq.read_table(path, columns=["sample_id", *columns]).to_pydict()
        for i, sample_id in enumerate(table["sample_id"]):
            assert sample_id not in found, f"{sample_id} is there twice"
            found[sample_id] = [table[name][i] for name in columns]
    return found


_LOGITS = ["std_clean", "std_attacked", "rob_clean", "rob_attacked"]
ATTACK = ["label", *_LOGITS, "margin", "std_broken", "rob_broken", "x_adv"]
EVALUATE = ["label", "mixed_clean", "mixed_attacked", "robust", "survived_warm-start", "survived_square", "x_adv"]


def rows_in(folder: Path, stage: str) -> Path:
    """Return the folder of a stage's rows, given the folder of a run; runs of its name have one kind of such rows."""
    (rows,) = (path for path in (folder.parents[1] / stage).iterdir() if path.is_dir())
    return rows


def rows_of(config: RunConfig, stage: str) -> Path:
    """Return the folder of a stage's rows of one run."""
    opened = reopen_run(config)
    return Path(opened.rows.address(rows_folder(stage, stage_of(config, stage).content_hash(opened))))

"""A stage is one file: the toy of docs/architecture.md runs, resumes and shows wherever a run does."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.cli.status import print_status, run_status
from mixednuts_dist.deployment.loading import read_run
from mixednuts_dist.errors import ConfigError, InvalidInputError, MissingArtifact
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages import estimate
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.stages.stage import stage_of, stages_of
from mixednuts_dist.storage.damage import verify
from tests.helpers.runs import MakeConfig, Watcher, tiny_file

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
(FLIP,) = (block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if '@STAGES("flip"' in block)
DIES = """
import os, signal

whole = Flip.compute


def compute(self, worker, partition):
    if partition.index == 1 and os.path.exists("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, worker, partition)


Flip.compute = compute
"""


@pytest.fixture
def flip(tmp_path: Path) -> Path:
    """The toy's file."""
    (tmp_path / "flip.py").write_text(FLIP)
    return tmp_path / "flip.py"


@pytest.fixture
def asking(tiny: MakeConfig, flip: Path) -> MakeConfig:
    """Tiny configurations that ask for the toy."""
    return lambda **changes: tiny(**{"extensions": [str(flip)], "flip": {}, **changes})


def test_user_stage_runs_on_the_pool_and_is_reported(
    asking: MakeConfig, ray_executor: Any, local_executor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = asking()
    assert [stage.name for stage in stages_of(config)] == ["attack", "evaluate", "flip"]
    results = pipeline.run(config, executor=local_executor)
    opened, stage = open_run(config), stage_of(config, "flip")
    for path in (Path(opened.rows.uri) / "flip").rglob("*.parquet"):
        path.unlink()
    print_status(run_status(config), Console(width=120))
    assert "flip     nothing finished yet" in capsys.readouterr().out
    stage.run(config, executor=ray_executor)  # on the pool's actors

    (row,) = results.stages
    rows = stage.rows(opened, ["mirrored_class"])
    x, y = open_dataset("digits").read(0, 24)
    mixed = read_run(opened.store.uri, trust_code=True).classifier()
    assert torch.equal(rows["mirrored_class"], mixed(x.flip(-1)).argmax(dim=1))
    assert (row.classifier, row.attack) == ("mixed, flip", "the classes of mirrored images")
    assert row.robust.correct == int((rows["mirrored_class"] == y).sum())
    assert results.to_json()["stages"]["mixed, flip"]["robust"]["correct"] == row.robust.correct
    assert [cost.stage for cost in results.costs] == ["attack", "evaluate", "flip"]
    assert "mixed, flip" in (Path(opened.store.uri) / "report/table.csv").read_text()
    print_status(run_status(config), Console(width=120))
    assert re.search(r"flip +3/3 +mixed", capsys.readouterr().out)
    assert verify(opened.rows)[0] == {}
    measured = estimate.run(config, executor=local_executor).stages[-1]
    assert (measured.stage, measured.images_left, measured.passes) == ("flip", 0, (2, 0))


def test_a_killed_stage_goes_on_from_what_it_has_written(tmp_path: Path) -> None:
    """The process is killed outright in the middle of the second of three partitions."""
    (tmp_path / "flip.py").write_text(FLIP + DIES)
    tiny_file(tmp_path, std=None, extensions=["flip.py"], flip={"axis": -2})
    (tmp_path / "die").write_text("")
    options = ["--only=flip", "--set=compute.executor=debug"]
    command = [sys.executable, "-m", "mixednuts_dist", "run", "tiny.yaml", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "runs").glob("tiny/flip/*")
    first = (folder / "part-00000.parquet").stat()
    assert [path.name for path in folder.glob("*.parquet")] == ["part-00000.parquet"]
    (tmp_path / "die").unlink()
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "2 partitions computed, 1 was done already" in again.stderr
    assert (folder / "part-00000.parquet").stat().st_mtime_ns == first.st_mtime_ns


def test_stage_is_added_to_a_finished_run(asking: MakeConfig, local_executor: Any) -> None:
    without, config = asking(std=None, flip=None), asking(std=None)
    assert without.run_id() == config.run_id()
    watcher = Watcher()
    stage_of(config, "flip").run(config, executor=local_executor, progress=watcher)
    assert len(watcher.computed) == 3
    watcher = Watcher()
    stage_of(config, "flip").run(config, executor=local_executor, progress=watcher)
    assert watcher.computed == []
    other = asking(std=None, flip={"axis": -2})
    stage_of(other, "flip").run(other, executor=local_executor, progress=watcher)
    assert len(watcher.computed) == 3, "other keys have rows of their own"
    with pytest.raises(InvalidInputError, match=r"does not request the stage 'flip'. Give it the key `flip: \{\}`"):
        stage_of(without, "flip")


def test_a_stage_about_the_mixture_needs_the_search(asking: MakeConfig, local_executor: Any) -> None:
    config = asking()
    with pytest.raises(MissingArtifact, match="Run: mixednuts search"):
        stage_of(config, "flip").run(config, executor=local_executor)


def test_the_name_decides_nothing(tiny: MakeConfig, tmp_path: Path, local_executor: Any) -> None:
    """The same class under two names leaves the same rows, each in its own folder."""
    (tmp_path / "two.py").write_text(FLIP + '\nSTAGES("certify_2", describes="the same")(Flip)\n')
    config = tiny(std=None, extensions=[str(tmp_path / "two.py")], flip={}, certify_2={})
    opened, rows = open_run(config), []
    for stage in stages_of(config)[1:]:
        stage.complete(opened, local_executor, Watcher())
        rows.append(stage.rows(opened, ["mirrored_class"]))
    assert torch.equal(*(row["mirrored_class"] for row in rows))


def test_stage_rejects_other_keys_and_names(tiny: MakeConfig, tmp_path: Path, flip: Path) -> None:
    with pytest.raises(ConfigError, match=r"flip\.axes: unknown key .*; did you mean 'axis'"):
        tiny(extensions=[str(flip)], flip={"axes": 1})
    with pytest.raises(ConfigError, match=r"flop: unknown key .*; did you mean 'flip'"):
        tiny(extensions=[str(flip)], flop={})
    (tmp_path / "taken.py").write_text(FLIP.replace('"flip"', '"storage"'))
    with pytest.raises(ConfigError, match="a stage cannot be named 'storage'"):
        tiny(extensions=[str(tmp_path / "taken.py")])


def test_the_command_the_list_and_the_schema_know_it(tmp_path: Path, flip: Path) -> None:
    config = str(tiny_file(tmp_path, extensions=[str(flip)], flip={}))
    refused = CliRunner().invoke(main, ["run", config, "--only", "flop"]).output
    assert "stage 'flop' is not known; did you mean 'flip'?" in refused
    names = CliRunner().invoke(main, ["schema", "--names", config]).output
    assert re.search(r"flip +the classes of mirrored images +\(yours\)", names)
    schema = json.loads(CliRunner().invoke(main, ["schema", config]).output)
    assert "flip" in schema["properties"]
    assert "flip" not in schema["required"]

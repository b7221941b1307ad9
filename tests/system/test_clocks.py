"""Two drivers of one run whose clocks are twenty minutes apart, and a third machine that asks for its status."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mixednuts_dist import pipeline
from mixednuts_dist.cli.status import run_status
from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.storage.store import Store
from tests.helpers.drivers import STAGES, Driver, comparable, rows
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import MakeConfig

pytestmark = pytest.mark.alone

OFF = 600.0  # seconds; S3 takes signatures that are 15 minutes off
ANOTHER_CLOCK = """
import datetime, os, time
import botocore.compat

off, clock, now = float(os.environ["CLOCK_OFF"]), time.time, botocore.compat.get_current_datetime
time.time = lambda: clock() + off
time.time_ns = lambda: int(time.time() * 1e9)
botocore.compat.get_current_datetime = lambda *a, **k: now(*a, **k) + datetime.timedelta(seconds=off)  # of signatures
"""


@pytest.fixture
def driver(tmp_path: Path, object_store: ObjectStore) -> Callable[[Path, float], Driver]:
    """Start a driver of a configuration in a process whose clock is wrong by some seconds."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(ANOTHER_CLOCK)

    def begin(config: Path, off: float) -> Driver:
        environment = {**os.environ, "CLOCK_OFF": str(off), "PYTHONPATH": str(tmp_path / "clock")}
        return Driver(config, object_store.uri("clocks"), tmp_path / f"log{off}", environment=environment)

    return begin


def test_two_drivers_whose_clocks_differ_end_in_the_rows_of_one(
    object_store: ObjectStore, driver: Callable[[Path, float], Driver], tiny: MakeConfig, tmp_path: Path
) -> None:
    config, file = tiny(compute={"executor": "debug"}, partition_size=2), tmp_path / "clocks.yaml"
    storage = object_store.uri("clocks")
    file.write_text(yaml.safe_dump({**config.model_dump(mode="json"), "storage": storage}))
    seen = load_config(file)
    ahead, behind = driver(file, OFF), driver(file, -OFF)
    ahead.wait_until(lambda: Store(storage).exists(f"{config.place()}/run.yaml"))
    while ahead.process.poll() is None or behind.process.poll() is None:
        for stage in run_status(seen).stages:
            assert stage.last_finished_seconds_ago is None or stage.last_finished_seconds_ago >= 0
            assert stage.seconds_left is None or stage.seconds_left >= 0
        time.sleep(0.5)
    here = comparable(json.dumps(pipeline.run(config, executor=DebugExecutor()).to_json()))
    for one in (ahead, behind):
        assert one.results()["accuracy"] == here["accuracy"]
        assert "damaged" not in one.log()
    assert rows(storage) == rows(config.storage)
    folders = [store.child(f"{stage}/{rows}") for store in [Store(storage).child(config.name)] for stage in STAGES
               for rows in store.names(stage)]  # fmt: skip
    assert not [path for folder in folders for path in folder.names("") if ".bad-" in path]

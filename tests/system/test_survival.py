"""Kill processes, nodes and services under a run: its rows and its table are those of an undisturbed run.

Killed workers of one machine are in tests/distributed/test_pool.py.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.stages.runs import RESULTS
from tests.helpers.drivers import (
    N_PARTITIONS,
    Driver,
    Undisturbed,
    comparable,
    driver_on,
    everything,
    leftovers,
    log_of,
    require_same,
    rows,
    stamps,
    undisturbed_run,
    workers_of,
)
from tests.helpers.local_head import Head
from tests.helpers.object_store import ObjectStore

pytestmark = [pytest.mark.alone, pytest.mark.timeout(420)]

OUTAGE_SECONDS = 8


def kill_a_worker(cluster: Head, _: Driver) -> None:
    workers_of(cluster)[0].kill()


def kill_a_node_and_add_one(cluster: Head, _: Driver) -> None:
    raylet = workers_of(cluster)[0].parent()
    assert raylet is not None
    raylet.kill()
    cluster.join()


def test_a_run_survives_every_fault(
    cluster: Head, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore
) -> None:
    """One attack loses a worker, a node and the storage for some seconds, and has the same rows."""
    storage = object_store.uri("faults")
    driver = driver_on(cluster, undisturbed.config, storage, tmp_path / "log")

    def in_the_attack(n_written: int) -> dict[str, Any]:
        """Wait for the n-th partition and for a worker; the attack must not be over."""
        driver.wait_until(lambda: len(stamps(storage, "attack")) >= n_written and bool(workers_of(cluster)))
        kept = stamps(storage, "attack")
        assert len(kept) < N_PARTITIONS, "the fault would fall after the attack"
        return kept

    kept = in_the_attack(1)
    for n_lost, disturb in enumerate((kill_a_worker, kill_a_node_and_add_one), start=1):
        disturb(cluster, driver)
        driver.wait_until(lambda n=n_lost: log_of(driver).count("lost a worker") >= n)
        kept |= in_the_attack(len(kept) + 1)
    object_store.kill()
    time.sleep(OUTAGE_SECONDS)
    assert driver.process.poll() is None, driver.log()
    object_store.restart()
    require_same(undisturbed, driver, storage)
    assert stamps(storage, "attack").items() >= kept.items(), "a finished partition was written again"
    assert object_store.secret not in driver.log()
    assert object_store.secret.encode() not in everything(storage)


WITH_ROUNDS = {
    "attack": {"n_iter": 30, "n_target_classes": 3},
    "search": {
        "beta": 0.5,  # easy to keep, so that the evaluation starts no second round
        "betas": [1.0, 0.5],
        "scales": {"min": 0.05, "max": 5, "count": 8, "spacing": "log"},
        "powers": {"min": 1, "max": 4, "count": 5},
        "biases": {"min": -1, "max": 0, "count": 6},
        "rounds": 1,
    },
    "evaluate": {"n_iter": 20, "n_target_classes": 3, "n_queries": 50},
}


# On the path of a process: it stops, with a sign, where the report opens its page. A signal that waits for the
# evaluation's last file instead may come when a quick report is written already.
HELD_AT_THE_REPORT = """
import pathlib, sys, time

def held(event, arguments):
    if event == "open" and str(arguments[0]).endswith("page.html.j2"):
        pathlib.Path({sign!r}).touch()
        time.sleep(900)

sys.addaudithook(held)
"""


def held_at_the_report(folder: Path) -> tuple[dict[str, str], Path]:
    """The environment of such a process, and the file that is its sign."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HELD_AT_THE_REPORT.format(sign=str(folder / "sign")))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}, folder / "sign"


def test_a_signal_in_each_stage_of_one_run(tmp_path: Path, local_executor: Any, cluster: Head) -> None:
    """Stop a run on its own Ray, without Ray and on a cluster, in turn, and resume it each time."""
    folder, storage = tmp_path / "undisturbed", str(tmp_path / "runs")
    folder.mkdir()
    undisturbed, kept = undisturbed_run(folder, local_executor, partition_size=3, **WITH_ROUNDS), dict[str, Any]()
    assert stamps(str(folder / "runs"), "search/round-1")

    def stopped(driver: Driver, stage: str, n_files: int, number: signal.Signals) -> None:
        driver.wait_until(lambda: bool(driver.log()) and len(stamps(storage, stage)) >= n_files)
        status, told = driver.interrupt(number), driver.log()
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], told
        assert number == signal.SIGKILL or "same command" in told.splitlines()[-1], told
        assert not any(word in told for word in ("Traceback", "SIGTERM received", "*** ")), told
        now = stamps(storage, "attack") | stamps(storage, "search/round-1") | stamps(storage, "evaluate")
        assert now.items() >= kept.items()  # what was finished before is not touched
        kept.update(now)

    given = undisturbed.config, storage
    stopped(Driver(*given, tmp_path / "attack"), "attack", 1, signal.SIGINT)
    assert len(stamps(storage, "attack")) < 8
    stopped(Driver(*given, tmp_path / "search", "--local"), "attack", 8, signal.SIGTERM)
    stopped(Driver(*given, tmp_path / "round", "--local"), "search/round-1", 1, signal.SIGKILL)
    assert len(stamps(storage, "search/round-1")) < 8
    stopped(driver_on(cluster, *given, tmp_path / "evaluate"), "evaluate", 1, signal.SIGTERM)
    environment, sign = held_at_the_report(tmp_path / "held")
    last = Driver(*given, tmp_path / "report", "--set=compute.executor=debug", environment=environment)
    last.wait_until(sign.exists)
    stopped(last, "evaluate", 8, signal.SIGINT)
    assert not list((tmp_path / "runs").rglob(RESULTS))
    resumed = pipeline.run(load_config(undisturbed.config, [f"storage={storage}"]), executor=local_executor)
    assert comparable(json.dumps(resumed.to_json())) == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(undisturbed: Undisturbed, tmp_path: Path, small_disk: Path) -> None:
    storage, ballast = str(small_disk / "runs"), small_disk / "ballast"
    ballast.write_bytes(bytes(2**24 - 5 * 2**12))  # leaves room for run.yaml and a page or two
    first = Driver(undisturbed.config, storage, tmp_path / "first", "--local", command="attack")
    assert first.exit_status() == 1
    assert "the disk is full" in first.log()
    assert "same command" in first.log()
    assert "Traceback" not in first.log()
    kept = stamps(storage, "attack")
    assert len(kept) < N_PARTITIONS
    ballast.unlink()
    again = Driver(undisturbed.config, storage, tmp_path / "again", "--local", command="attack")
    assert again.exit_status() == 0, again.log()
    assert rows(storage) == {key: row for key, row in undisturbed.rows.items() if key[0] == "attack"}
    assert stamps(storage, "attack").items() >= kept.items()
    assert leftovers(storage) == []

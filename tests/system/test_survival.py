"""Anything may die at any moment: the same rows and the same table as of the run that nothing disturbed.

Killed workers and poison images are in tests/distributed/test_pool.py.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mixednuts_dist.stages.runs import RESULTS
from tests.helpers.drivers import (
    ROOT,
    Driver,
    Undisturbed,
    attack_status,
    comparable,
    driver_on,
    everything,
    leftovers,
    rows,
    stamps,
    undisturbed_run,
)
from tests.helpers.local_head import ONE_MACHINE, Head, local_head
from tests.helpers.object_store import ObjectStore

pytestmark = [pytest.mark.alone, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def head(object_store_server: ObjectStore) -> Iterator[Head]:
    """A cluster that outlives every driver, with room for two of them."""
    with local_head("--num-cpus=4", environment=object_store_server.environment) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Undisturbed:
    attack = {"n_iter": 120, "n_target_classes": 4}
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), local_executor, attack=attack)


def test_a_killed_driver(undisturbed: Undisturbed, tmp_path: Path, head: Head) -> None:
    storage = str(tmp_path / "runs")
    first = driver_on(head, undisturbed.config, storage, tmp_path / "first")
    first.wait_until(lambda: len(stamps(storage, "attack")) >= 2)
    first.kill()
    kept = stamps(storage, "attack")
    assert len(kept) < 8
    again = driver_on(head, undisturbed.config, storage, tmp_path / "again")
    assert again.results() == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert {path: stamp for path, stamp in stamps(storage, "attack").items() if path in kept} == kept
    assert leftovers(storage) == []


WITH_ROUNDS = {
    "attack": {"n_iter": 30, "n_target_classes": 3},
    "search": {
        "beta": 0.95,
        "betas": [1.0, 0.9],
        "scales": {"min": 0.05, "max": 5, "count": 8, "spacing": "log"},
        "powers": {"min": 1, "max": 4, "count": 5},
        "biases": {"min": -1, "max": 0, "count": 6},
        "rounds": 2,
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
    return {**os.environ, "PYTHONPATH": str(folder)}, folder / "sign"


def test_a_signal_in_each_stage_of_one_run(tmp_path: Path, local_executor: Any, head: Head) -> None:
    """On a Ray of its own, as on a laptop, on a cluster, without Ray; the last time by the script that Ray jobs run."""
    folder, storage = tmp_path / "undisturbed", str(tmp_path / "runs")
    folder.mkdir()
    undisturbed, kept = undisturbed_run(folder, local_executor, **WITH_ROUNDS), dict[str, Any]()
    assert stamps(str(folder / "runs"), "search/round-1")

    def stopped(driver: Driver, stage: str, n_files: int, number: signal.Signals) -> None:
        driver.wait_until(lambda: bool(driver.log()) and len(stamps(storage, stage)) >= n_files)
        status, told = driver.interrupt(number), driver.log()
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], told
        assert number == signal.SIGKILL or "the same command goes on from there" in told.splitlines()[-1], told
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
    stopped(driver_on(head, *given, tmp_path / "evaluate"), "evaluate", 1, signal.SIGTERM)
    environment, sign = held_at_the_report(tmp_path / "held")
    last = Driver(*given, tmp_path / "report", "--local", environment=environment)
    last.wait_until(sign.exists)
    stopped(last, "evaluate", 8, signal.SIGINT)
    assert not list((tmp_path / "runs").rglob(RESULTS))
    job = [sys.executable, str(ROOT / "jobs" / "run.py"), str(undisturbed.config), "--json", f"--set=storage={storage}"]
    again = subprocess.run(job, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert comparable(again.stdout) == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []


OUTAGE_SECONDS = 20
WORKER_LOGS = "session_latest/logs/worker-*.err"


def test_an_s3_server_that_is_gone_for_20_seconds(
    undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore, head: Head
) -> None:
    storage, logs_before = object_store.uri("outage"), set(head.folder.glob(WORKER_LOGS))
    driver = driver_on(head, undisturbed.config, storage, tmp_path / "log")
    driver.wait_until(lambda: bool(stamps(storage, "attack")))
    kept = stamps(storage, "attack")
    assert len(kept) < 8
    object_store.kill()
    time.sleep(OUTAGE_SECONDS)
    assert driver.process.poll() is None, driver.log()
    object_store.restart()
    assert driver.results() == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert {path: stamp for path, stamp in stamps(storage, "attack").items() if path in kept} == kept
    assert leftovers(storage) == []
    assert object_store.secret not in driver.log()
    assert object_store.secret.encode() not in everything(storage)
    logs = [path.read_text() for path in set(head.folder.glob(WORKER_LOGS)) - logs_before]
    assert any('"partition"' in log for log in logs)
    assert not any("Traceback" in log for log in (driver.log(), *logs))


class OnTwoMachines(NamedTuple):
    """A driver in the middle of the attack, on two machines of which one does as it is told."""

    driver: Driver
    storage: str
    machines: "subprocess.Popen[str]"

    def tell(self, order: str, answer: str) -> None:
        assert self.machines.stdin is not None
        assert self.machines.stdout is not None
        self.machines.stdin.write(f"{order}\n")
        self.machines.stdin.flush()
        assert self.machines.stdout.readline() == f"{answer}\n"


@pytest.fixture
def on_two_machines(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OnTwoMachines]:
    script = ROOT / "tests" / "helpers" / "two_machines.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **ONE_MACHINE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for name, value in ONE_MACHINE.items():
            monkeypatch.setenv(name, value)
        storage, address = str(tmp_path / "runs"), process.stdout.readline().strip()
        driver = Driver(undisturbed.config, storage, tmp_path / "log", "--address", address, "-v")
        driver.wait_until(lambda: bool(stamps(storage, "attack")))
        yield OnTwoMachines(driver, storage, process)
    finally:
        process.communicate(timeout=120)


def test_a_killed_machine(undisturbed: Undisturbed, on_two_machines: OnTwoMachines) -> None:
    driver, storage, _ = on_two_machines
    kept = stamps(storage, "attack")
    on_two_machines.tell("kill", answer="killed")
    assert driver.results() == undisturbed.results
    assert "lost a worker" in driver.log()
    assert rows(storage) == undisturbed.rows
    assert {path: stamp for path, stamp in stamps(storage, "attack").items() if path in kept} == kept
    assert leftovers(storage) == []


def test_a_drained_machine(undisturbed: Undisturbed, on_two_machines: OnTwoMachines) -> None:
    """Its worker finishes the piece that it is at and is released: nothing is lost and nothing is done twice."""
    driver, storage, _ = on_two_machines
    on_two_machines.tell("drain", answer="drained")
    there, told = len(stamps(storage, "attack")), attack_status(undisturbed.config, storage)
    assert there <= told["partitions_done"] <= len(stamps(storage, "attack"))
    assert driver.results() == undisturbed.results
    told = attack_status(undisturbed.config, storage)
    assert (told["partitions_done"], told["images"], told["images_left"]) == (8, 24, 0)
    assert "is drained" in driver.log()
    assert "lost a worker" not in driver.log()
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []


def test_two_drivers_of_the_same_run_a_random_time_apart(
    undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore, head: Head
) -> None:
    storage, apart = object_store.uri("twice"), random.uniform(0, 10)
    drivers = [driver_on(head, undisturbed.config, storage, tmp_path / "one")]
    time.sleep(apart)
    drivers.append(driver_on(head, undisturbed.config, storage, tmp_path / "two"))
    assert [driver.results() for driver in drivers] == [undisturbed.results] * 2, f"{apart:.1f} s apart"
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []
    for driver in drivers:
        assert object_store.secret not in driver.log()


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


def test_a_full_disk(undisturbed: Undisturbed, tmp_path: Path, small_disk: Path, head: Head) -> None:
    storage, ballast = str(small_disk / "runs"), small_disk / "ballast"
    ballast.write_bytes(bytes(2**24 - 5 * 2**12))  # leaves room for run.yaml and a page or two
    first = driver_on(head, undisturbed.config, storage, tmp_path / "first")
    assert first.exit_status() == 1
    assert "the disk is full" in first.log()
    assert "Make room; the same command goes on" in first.log()
    assert "Traceback" not in first.log()
    kept = stamps(storage, "attack")
    ballast.unlink()
    again = driver_on(head, undisturbed.config, storage, tmp_path / "again")
    assert again.results() == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert {path: stamp for path, stamp in stamps(storage, "attack").items() if path in kept} == kept
    assert leftovers(storage) == []

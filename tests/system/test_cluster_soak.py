"""Ray's own fault tolerance under a run: leaks, random signals, a killed GCS and a killed head. Run with `-m soak`."""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.utils import get_system_memory, get_used_memory

from tests.helpers.drivers import (
    N_PARTITIONS,
    Driver,
    Undisturbed,
    begun,
    driver_on,
    log_of,
    require_same,
    stamps,
    undisturbed_run,
    workers_of,
)
from tests.helpers.local_head import RECONNECTS, Head, local_head
from tests.helpers.object_store import ObjectStore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(420)]

LEAKS = """
import os
import torch
from mixednuts_dist.classifiers.factories import demo_rob

class Leaks(torch.nn.Module):
    calls, held = 0, []

    def __init__(self):
        super().__init__()
        self.base = demo_rob()

    def forward(self, x):
        Leaks.calls += 1
        if Leaks.calls > int(os.environ.get("LEAKS_AFTER", "1000000000")) and len(Leaks.held) < 100:
            Leaks.held.append(torch.ones(2**24))  # 64 MiB
        return self.base(x)
"""


def test_run_survives_a_memory_leak(
    cluster: Head, tmp_path: Path, local_executor: Any, object_store: ObjectStore
) -> None:
    """Each worker computes some partitions before it is killed, and the next one continues."""
    (tmp_path / "leaks.py").write_text(LEAKS)
    leaking = undisturbed_run(tmp_path, local_executor, rob=f"py:{tmp_path / 'leaks.py'}:Leaks")
    # The driver, the node and a worker that does not leak take about 2.5 GiB.
    allowed = (get_used_memory() + 4 * 2**30) / get_system_memory()
    watched = {"RAY_memory_usage_threshold": f"{allowed:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    raylet = cluster.join({"memory": "watched"}, LEAKS_AFTER="200", **watched)
    try:
        placement = ('--set=compute.label_selector={"memory":"watched"}', "--set=compute.num_workers=1")
        storage = object_store.uri("leaks")
        driver = driver_on(cluster, leaking.config, storage, tmp_path / "log", *placement)
        require_same(leaking, driver, storage)
        assert "lost a worker" in log_of(driver)
        assert "running low on memory" in log_of(driver)
    finally:
        raylet.kill()  # the other tests' workers would meet the same limit


STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


def test_twelve_signals_at_random_moments(
    cluster: Head, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore
) -> None:
    """Three of them end the driver, which is begun again; the others meet workers, and one of each only pauses."""
    storage, draw, drivers = object_store.uri("signals"), random.Random(29), list[Driver]()

    def running() -> Driver:
        if not drivers or drivers[-1].process.poll() is not None:
            drivers.append(driver_on(cluster, undisturbed.config, storage, tmp_path / f"log-{len(drivers)}"))
        return drivers[-1]

    def victim(driver: Driver, wanted: int, of_the_driver: bool) -> psutil.Process:
        """Wait for `wanted` partitions, a running driver and workers; then choose a process."""
        found = list[psutil.Process]()

        def ready() -> bool:
            found[:] = (
                [psutil.Process(driver.process.pid)] * bool(driver.log()) if of_the_driver else workers_of(cluster)
            )
            return bool(found) and len(stamps(storage, "attack")) >= wanted

        driver.wait_until(ready)
        return draw.choice(found)

    plan = [(True, number) for number in (*STATUS, signal.SIGSTOP)]
    plan += [(False, number) for number in (*STATUS, *STATUS, signal.SIGSTOP, signal.SIGKILL)]
    draw.shuffle(plan)
    for wanted, (of_the_driver, number) in zip(sorted(draw.choices(range(N_PARTITIONS), k=12)), plan, strict=True):
        driver = running()
        target = victim(driver, wanted, of_the_driver)
        time.sleep(draw.random())
        with suppress(psutil.NoSuchProcess):  # a worker of a driver that is gone
            target.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(2)
                target.resume()
        if of_the_driver and number != signal.SIGSTOP:
            assert driver.exit_status() == STATUS[number], driver.log()
    require_same(undisturbed, running(), storage)
    assert len(drivers) == 4
    for driver in drivers:
        assert "Traceback" not in driver.log()


# Each is a process that takes seconds of the 15 that Ray gives a head's raylet.
LEAN = ("--include-dashboard=false", "--no-monitor", "--include-log-monitor=false")


def begin_again(head: Head, undisturbed: Undisturbed, storage: str, log: Path, *options: str) -> None:
    """The head by its own command, on its own port, and then the run."""
    kept, deadline = stamps(storage, "attack"), time.monotonic() + 300
    while not head.start(*LEAN):
        assert time.monotonic() < deadline, f"no new head in five minutes: {(head.folder / 'head.log').read_text()}"
    if not head.daemons("raylet")[1:]:
        head.join()
    require_same(undisturbed, driver_on(head, undisturbed.config, storage, log, *options), storage)
    assert stamps(storage, "attack").items() >= kept.items()


def require_given_up(driver: Driver) -> None:
    assert driver.exit_status() == 1
    assert "same command" in log_of(driver)
    assert "Traceback" not in driver.log()


def test_a_killed_gcs_without_fault_tolerance(
    object_store_server: ObjectStore, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore
) -> None:
    """The head ends at once and its node when its patience does; the same command resumes on new ones."""
    environment = {**object_store_server.environment, RECONNECTS: "15"}
    with local_head("--num-cpus=0", *LEAN, environment=environment) as head:
        storage, node = object_store.uri("gcs"), head.join()
        driver = begun(head, undisturbed, storage, tmp_path / "log")
        assert head.process is not None
        head.daemons("gcs_server")[0].kill()
        require_given_up(driver)
        head.process.wait(300)
        node.wait(300)
        begin_again(head, undisturbed, storage, tmp_path / "again")


def test_a_restarted_gcs(cluster: Head, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore) -> None:
    """Its state comes from Redis. `ray start --block` would end the whole head, so that process is paused."""
    storage = object_store.uri("restarted")
    driver, kept = begun(cluster, undisturbed, storage, tmp_path / "log"), stamps(storage, "attack")
    (server,) = cluster.daemons("gcs_server")
    command, environment = server.cmdline(), server.environ()
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGSTOP)
    server.kill()
    driver.wait_until(lambda: "does not answer" in log_of(driver))
    cluster.begin(command, cluster.folder / "gcs.log", environment)
    require_same(undisturbed, driver, storage)
    assert stamps(storage, "attack").items() >= kept.items(), "a finished partition was written again"


def test_a_killed_head(cluster: Head, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore) -> None:
    """The nodes wait for it to come back, and what it knew comes from the server that outlives it.

    This is the last test of this cluster, which has no dashboard afterwards.
    """
    storage = object_store.uri("head")
    driver = begun(cluster, undisturbed, storage, tmp_path / "log", **{RECONNECTS: "15"})
    cluster.kill()
    require_given_up(driver)
    nodes = {raylet.pid for raylet in cluster.daemons("raylet")}
    begin_again(cluster, undisturbed, storage, tmp_path / "again")
    assert nodes < {raylet.pid for raylet in cluster.daemons("raylet")}

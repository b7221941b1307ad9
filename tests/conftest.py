"""One local Ray for the whole suite, and runs that take seconds."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from mixednuts_dist.config import register
from mixednuts_dist.config.run_config import RunConfig, parse_config
from tests.object_store import ObjectStore

if TYPE_CHECKING:  # Ray takes seconds to import, and the tests of many rooms do without it
    from mixednuts_dist.distributed.debug import DebugExecutor
    from mixednuts_dist.distributed.ray_executor import RayExecutor

MAIN_JOB = "uv run mixednuts run jobs/configs/digits.yaml"

torch.set_num_threads(1)


class Finished(NamedTuple):
    """A finished run: its configuration, its folder, and its results as JSON."""

    config: RunConfig
    folder: Path
    results: dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the tests are noted as the user's own elsewhere than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
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
def tiny_run(tmp_path_factory: pytest.TempPathFactory, ray_executor: "RayExecutor") -> Finished:
    """A tiny run that went through all stages on Ray, for the whole suite. Who changes its files takes a copy."""
    from mixednuts_dist import pipeline

    config = parse_config(tiny_content(tmp_path_factory.mktemp("tiny-run")))
    results = pipeline.run(config, executor=ray_executor)
    return Finished(config, Path(config.storage) / config.run_id(), results.to_json())


@pytest.fixture
def copied_run(tiny_run: Finished, tmp_path: Path) -> Finished:
    """A copy of it that a test may damage."""
    config = tiny_run.config.with_changes(storage=str(tmp_path / "copied"))
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "copied" / tiny_run.folder.name))
    return Finished(config, folder, tiny_run.results)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without files: drawing them takes most of a run that has little to do."""
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
    for name, value in object_store_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_store_server


class MainJob(NamedTuple):
    """The README's main job, run once for the whole suite."""

    results: dict[str, Any]
    storage: str
    stderr: str


@pytest.fixture(scope="session")
def main_job(object_store_server: ObjectStore) -> MainJob:
    """As a user types it, into a bucket; whoever reads it there asks for `object_store` too."""
    storage = object_store_server.uri("main-job")
    arguments = MAIN_JOB.removeprefix("uv run mixednuts ").split()
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("mixednuts")), *arguments, "--json", "-v", "--set", f"storage={storage}"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **object_store_server.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return MainJob(json.loads(shown.stdout), storage, shown.stderr)


def tiny_content(storage: Path, **changes: Any) -> dict[str, Any]:
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
        },
        "evaluate": {"n_iter": 5, "n_target_classes": 2, "n_queries": 20},
        "storage": str(storage),
        "compute": {"num_workers": 2},
    }
    return {**content, **changes}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunConfig]:
    """A factory of tiny configurations under the test's own folder."""
    return lambda **changes: parse_config(tiny_content(tmp_path / "runs", **changes))


@pytest.fixture(autouse=True)
def _extensions_of_its_own() -> Iterator[None]:
    """No test sees the extensions of another, unless a fixture of more than one test has loaded them before it."""
    before = {name for name in sys.modules if name.startswith("mixednuts_extension_")}
    yield
    for module in [name for name in sys.modules if name.startswith("mixednuts_extension_") and name not in before]:
        register._forget(module)

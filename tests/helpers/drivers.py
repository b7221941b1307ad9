"""Real `mixednuts run` processes, and what they leave in storage."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import psutil
import pyarrow.parquet as pq
import yaml

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import parse_config
from tests.helpers.local_head import Head
from tests.helpers.runs import tiny_content

ROOT = Path(__file__).parents[2]
STAGES = ("attack", "evaluate")
N_PARTITIONS = 16  # in the fixture `undisturbed`
_PATIENCE_SECONDS = 300.0


class Driver:
    """A process that runs `mixednuts run CONFIG --json`; stop it with `kill` or wait for it with `results`."""

    def __init__(
        self,
        config: Path,
        storage: str,
        log: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        command: str = "run",
    ) -> None:
        self._out, self._log = log.with_suffix(".out"), log
        program = ["env", "--default-signal=INT"]  # which a shell's background job has ignored
        program += [str(Path(sys.executable).with_name("mixednuts")), command, str(config)]
        program += ["--json"] if command == "run" else []
        with self._out.open("w") as out, self._log.open("w") as err:
            self.process = subprocess.Popen(
                [*program, "--set", f"storage={storage}", *options], cwd=ROOT, env=environment, stdout=out, stderr=err
            )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition()`; the driver must still be at work then."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the driver has ended: {self.log()}"
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C, or another signal; returns the exit status."""
        self.process.send_signal(number)
        return self.exit_status()

    def exit_status(self) -> int:
        """Wait for the process's end. One that does not end is killed, and its log is the error."""
        try:
            return self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the driver does not end: {self.log()}") from None

    def results(self) -> dict[str, Any]:
        """Return the results that it printed, without values that depend on the machine's speed."""
        assert self.exit_status() == 0, self.log()
        return comparable(self._out.read_text())

    def log(self) -> str:
        return self._log.read_text()


def comparable(printed: str) -> dict[str, Any]:
    """Parse the output of `--json` and drop speeds and the provenance, which names the run's folder."""
    left_out = ("seconds", "costs", "provenance")
    return {key: value for key, value in json.loads(printed).items() if not key.startswith(left_out)}


def stamps(storage: str, stage: str) -> dict[str, Any]:
    """Finished partitions of the only run under `storage` -> when each was written."""
    _, files = files_in(storage)
    return {
        path: info.get("LastModified", info.get("mtime"))
        for path, info in files.items()
        if re.search(rf"/{stage}/[0-9a-f]{{8}}/part-[0-9]+\.parquet$", path)
    }


def rows(storage: str) -> dict[tuple[str, int], dict[str, Any]]:
    """(stage, sample id) -> every column of its row, from the files of the only run under `storage`."""
    fs, _ = files_in(storage)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for stage in STAGES:
        for path in sorted(stamps(storage, stage)):
            with fs.open(path, "rb") as file:
                table = pq.read_table(file, page_checksum_verification=True)
            for row in table.to_pylist():
                key = (stage, row["sample_id"])
                assert key not in found, f"{key} is there twice"
                found[key] = row
    return found


def leftovers(storage: str) -> list[str]:
    """Files that a finished run has no use for. The draft of a killed writer is deleted an hour later."""
    return [path for path in files_in(storage)[1] if "/errors/" in path]


def everything(storage: str) -> bytes:
    """All bytes of all files, to look for what must not be there."""
    fs, files = files_in(storage)
    return b"".join(map(fs.cat_file, files))


def files_in(storage: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the file system of a storage and its files with their details."""
    fs, root = fsspec.core.url_to_fs(storage, **({"use_listings_cache": False} if "://" in storage else {}))
    return fs, fs.find(root, detail=True)


class Undisturbed(NamedTuple):
    """A finished run: its configuration, printed results and rows."""

    config: Path
    results: dict[str, Any]
    rows: dict[tuple[str, int], dict[str, Any]]


def driver_on(head: Head, config: Path, storage: str, log: Path, *options: str, **environment: str) -> Driver:
    return Driver(
        config, storage, log, "--address", head.address, *options, environment={**head.environment, **environment}
    )


def undisturbed_run(folder: Path, executor: Any, **changes: Any) -> Undisturbed:
    """Run a configuration in this process. Any other executor and number of workers must produce the same bits."""
    content = tiny_content(folder / "runs", **{"partition_size": 2, **changes})
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    results = pipeline.run(parse_config(content), executor=executor)
    found = rows(str(folder / "runs"))
    assert {(stage, i) for stage in STAGES for i in range(content["data"]["n"])} <= set(found)
    return Undisturbed(folder / "tiny.yaml", comparable(json.dumps(results.to_json())), found)


def log_of(driver: Driver) -> str:
    """Return the driver's log as one line; the log itself wraps its lines at 80 columns."""
    return " ".join(driver.log().split())


def require_same(undisturbed: Undisturbed, driver: Driver, storage: str) -> None:
    """Wait for the driver's end and compare its results and stored rows with those of the undisturbed run."""
    assert driver.results() == undisturbed.results
    assert rows(storage) == undisturbed.rows
    assert leftovers(storage) == []
    assert "Traceback" not in driver.log()


def begun(head: Head, undisturbed: Undisturbed, storage: str, log: Path, **environment: str) -> Driver:
    """Start a driver and return it in the middle of its attack."""
    driver = driver_on(head, undisturbed.config, storage, log, **environment)
    driver.wait_until(lambda: bool(stamps(storage, "attack")))
    assert len(stamps(storage, "attack")) < N_PARTITIONS
    return driver


def workers_of(head: Head) -> list[psutil.Process]:
    """Return the worker processes of all nodes, busy or not."""
    children = [child for raylet in head.daemons("raylet") for child in raylet.children()]
    return [child for child in children if "RayWorker" in child.name() or "RayWorker" in " ".join(child.cmdline())]

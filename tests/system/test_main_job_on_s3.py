"""The README's main job on a real object store whose server is killed in the middle of it, for 20 seconds."""

import time
from pathlib import Path

import pytest

from tests.conftest import MainJob
from tests.object_store import ObjectStore
from tests.system.drivers import ROOT, Driver, everything, leftovers, rows, stamps

OUTAGE_SECONDS = 20


@pytest.mark.timeout(3600)
def test_a_server_that_is_gone_for_20_seconds_changes_nothing(
    main_job: MainJob, object_store: ObjectStore, tmp_path: Path
) -> None:
    storage = object_store.uri("main-job")
    driver = Driver(ROOT / "jobs" / "configs" / "digits.yaml", storage, tmp_path / "log", "-v")
    driver.wait_until(lambda: len(stamps(storage, "attack")) >= 2)
    kept = stamps(storage, "attack")
    object_store.kill()
    time.sleep(OUTAGE_SECONDS)
    assert driver.process.poll() is None, driver.log()
    object_store.restart()
    results = driver.results()
    assert results == {key: main_job.results[key] for key in results}
    assert rows(storage) == rows(str(main_job.storage / main_job.results["run"]["id"]))
    assert {path: stamp for path, stamp in stamps(storage, "attack").items() if path in kept} == kept
    assert leftovers(storage) == []
    assert object_store.secret not in driver.log()
    assert object_store.secret.encode() not in everything(storage)

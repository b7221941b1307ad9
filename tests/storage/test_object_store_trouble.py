"""What an S3 server does to a run: tokens that expire, clocks, a bucket that goes, slowness, objects beside ours."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import s3fs

from mixednuts_dist import pipeline
from mixednuts_dist.cli.status import run_status
from mixednuts_dist.config import RunConfig
from mixednuts_dist.errors import MixedNutsError, StoreError
from mixednuts_dist.storage import outages
from mixednuts_dist.storage.store import Store, concurrently
from tests.conftest import Finished
from tests.object_store import ObjectStore
from tests.storage.fault_proxy import RefusingProxy


@pytest.fixture
def proxy(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingProxy]:
    """In front of the server; fsspec's connections are made anew before and after."""
    made = RefusingProxy(object_store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    made.close()
    s3fs.S3FileSystem.clear_instance_cache()


EXPIRED = (400, "ExpiredToken", "the access token has expired .*Renew it; the same command goes on")
SKEWED = (403, "RequestTimeTooSkewed", r"this machine's clock or the server's is wrong .*Here it is 20\d\d-")


@pytest.mark.parametrize(("status", "code", "message"), [EXPIRED, SKEWED], ids=["expired token", "clock of 20 minutes"])
@pytest.mark.parametrize("call", ["exists", "read", "write", "create", "names", "delete"])
def test_an_expired_token_and_a_wrong_clock_are_told_at_once_in_words(
    object_store: ObjectStore, proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch, status: int, code: str,
    message: str, call: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(outages.time, "sleep", lambda _: pytest.fail("it waits"))
    store = Store(object_store.uri("trouble"))
    proxy.refuse(status, code)
    content = (b"x",) if call in ("write", "create") else ()
    with pytest.raises(StoreError, match=message) as caught:
        getattr(store, call)("a/file", *content)
    assert object_store.secret not in str(caught.value)


@pytest.mark.usefixtures("proxy")
def test_a_token_that_its_profile_renews_is_renewed_before_it_expires(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As those of `credential_process`, a sign-on, a web identity or a machine's role are, by botocore."""
    asked, given = tmp_path / "asked", tmp_path / "given.json"
    expires = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()  # botocore renews what has less than ten
    key = {"Version": 1, "AccessKeyId": "tests", "SecretAccessKey": object_store.secret, "Expiration": expires}
    given.write_text(json.dumps(key))
    (tmp_path / "process").write_text(f"#!/bin/sh\necho >> {asked}\ncat {given}\n")
    (tmp_path / "process").chmod(0o700)
    (tmp_path / "config").write_text(
        f"[profile renewed]\ncredential_process = {tmp_path}/process\nregion = us-east-1\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "renewed")
    store = Store(object_store.uri("renewed"))
    store.write("file", b"1")
    before = len(asked.read_text())
    assert store.read("file") == b"1"
    assert len(asked.read_text()) > before


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("status", "code", "message"),
    [EXPIRED, SKEWED, (404, "NoSuchBucket", "there is no such place .*Create the bucket")],
    ids=["expired token", "clock of 20 minutes", "deleted bucket"],
)
def test_what_ends_in_mid_run_is_named_and_the_same_command_goes_on(
    object_store: ObjectStore, proxy: RefusingProxy, tiny_run: Finished, local_executor: Any, status: int, code: str,
    message: str,
) -> None:  # fmt: skip
    config: RunConfig = tiny_run.config.with_changes(storage=object_store.uri(f"mid-run-{code.lower()}"))
    started = proxy.n_requests
    for after in (12, 25, 40, 60):
        proxy.refuse(status, code, after=after)
        with pytest.raises(MixedNutsError, match=message):
            pipeline.run(config, executor=local_executor)
        proxy.pass_on()
    assert run_status(config).stages[0].done > 0  # what was written before stays
    assert pipeline.run(config, executor=local_executor).to_json()["accuracy"] == tiny_run.results["accuracy"]
    assert proxy.n_requests > started


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_store_that_takes_its_time_changes_no_row_and_few_requests_wait_for_each_other(
    object_store: ObjectStore, proxy: RefusingProxy, tiny_run: Finished, local_executor: Any
) -> None:
    """A request takes .2 s here, and the same number of them 2 s as well: it is this number that is bounded."""
    proxy._delay = 0.2
    config: RunConfig = tiny_run.config.with_changes(storage=object_store.uri("slow"))
    assert pipeline.run(config, executor=local_executor).to_json()["accuracy"] == tiny_run.results["accuracy"]
    assert proxy.n_requests < 250


@pytest.mark.slow
def test_the_objects_beside_a_run_are_never_listed(
    object_store: ObjectStore, proxy: RefusingProxy, tiny_run: Finished
) -> None:
    """5,000 objects under the prefix: a thousand an answer, so that each listing that reads them has five more."""
    config: RunConfig = tiny_run.config.with_changes(storage=object_store.uri("crowded"))
    run = Store(config.storage).child(config.run_id())
    for path in Store(str(tiny_run.folder)).all_files():
        run.write(path, (tiny_run.folder / path).read_bytes())
    before = proxy.listings
    alone = run_status(config).to_json()
    listings = proxy.listings - before
    root = Store(config.storage)
    concurrently(lambda i: root.write(f"other-{i:05d}/file", b""), range(5000))
    before = proxy.listings
    beside = run_status(config).to_json()
    assert proxy.listings - before == listings
    assert {**beside, "stages": None} == {**alone, "stages": None}

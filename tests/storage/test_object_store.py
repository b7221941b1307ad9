"""The store on a real S3 server: what it keeps, what it waits for, and what it tells at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from mixednuts_dist import pipeline
from mixednuts_dist.errors import StoreError
from mixednuts_dist.storage import outages
from mixednuts_dist.storage import store as store_module
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import encode_table, finished_rows, read_columns
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import Finished
from tests.helpers.stored_rows import columns, content_of, summary


@pytest.fixture
def store(object_store: ObjectStore, request: pytest.FixtureRequest) -> Store:
    return Store(object_store.uri(f"{request.node.name}/runs")).child("run-1")


def test_a_file_above_one_put_is_whole_too(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = partialmethod(s3fs.S3FileSystem._pipe_file, chunksize=5 * 2**20)
    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", parts)
    s3fs.S3FileSystem.clear_instance_cache()
    store = Store(object_store.uri("above"))
    content = bytes(range(256)) * (12 * 2**12)
    assert store.create("large", content)
    assert not store.create("large", content[1:])
    assert store.read("large") == content


def test_readers_transfer_only_the_columns_and_row_groups_they_need(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, n_bytes = split_images(160, 80), 3 * 64 * 64 * 4
    images = {part: torch.rand(len(part), 3, 64, 64) for part in parts}
    for part in parts:
        table = {**columns(part), "images": images[part]}
        store.write(f"attack/f0/{part.file_name}", encode_table(table, "f0", summary(part)))
    travelled = 0
    cat_file = s3fs.S3FileSystem.cat_file

    def counted(*arguments: Any, **options: Any) -> bytes:
        nonlocal travelled
        content: bytes = cat_file(*arguments, **options)
        travelled += len(content)
        return content

    monkeypatch.setattr(s3fs.S3FileSystem, "cat_file", counted)
    assert finished_rows(store, f"attack/f0/{parts[1].file_name}", "f0", parts[1]) == summary(parts[1])
    assert travelled <= 2**16
    found = read_columns(store, "attack", parts, "f0", ["sample_id", "margin"])
    assert torch.equal(found["margin"], torch.cat([columns(part)["margin"] for part in parts]))
    assert travelled < 400_000 < 160 * n_bytes
    one = read_columns(store, "attack", parts, "f0", ["images"], sample_ids=torch.tensor([100]))
    assert torch.equal(one["images"], images[parts[1]][[20]])
    assert travelled < 400_000 + 34 * n_bytes, "one row group of at most 32 images"


@pytest.mark.parametrize("fault", ["slow down", "reset", "silence"])
def test_throttling_and_broken_connections_pass(
    object_store: ObjectStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(outages, "_FIRST_WAIT", 0.01)
    fault_proxy.fault, fault_proxy.faults_left = fault, 3
    store = Store(object_store.uri(f"faults/{fault[:4]}"))
    store.write("file", b"content")
    assert store.read("file") == b"content"
    assert fault_proxy.faults_left == 0


@pytest.mark.usefixtures("no_pictures")
def test_run_tolerates_damaged_answers(
    object_store: ObjectStore, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tiny_run: Finished,
    local_executor: Any,
) -> None:  # fmt: skip
    """Answers are damaged on the way, but the files in the bucket are whole and none is quarantined."""
    monkeypatch.setattr(outages, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(outages, "_LONGEST_WAIT", 0.05)
    fault_proxy.corrupted_share = 0.3
    config = tiny_run.config.with_changes(storage=object_store.uri("corrupted"))
    results = pipeline.run(config, executor=local_executor).to_json()
    assert fault_proxy.n_corrupted > 10
    store = Store(object_store.uri("corrupted"))
    folders = {path.rpartition("/")[0] for path in store.all_files() if "/part-" in path}
    assert folders
    assert not [name for folder in folders for name in store.names(folder) if ".bad-" in name]
    assert results["accuracy"] == tiny_run.results["accuracy"]


def test_a_killed_server_is_waited_for(store: Store, object_store: ObjectStore) -> None:
    store.write("before", b"1")
    object_store.kill()

    def write_and_read() -> bytes:
        store.write("after", b"2")
        return store.read("before")

    with ThreadPoolExecutor() as threads:
        found = threads.submit(write_and_read)
        try:
            time.sleep(2)
            assert not found.done()
        finally:
            object_store.restart()
        assert found.result(timeout=60) == b"1"
    assert store.read("after") == b"2"


def test_store_raises_after_its_patience(object_store: ObjectStore) -> None:
    store = Store(object_store.uri("patience"), patience_seconds=1)
    part = split_images(3, 3)[0]
    store.write(f"attack/f0/{part.file_name}", content_of(part))
    object_store.kill()
    try:
        with pytest.raises(StoreError, match=r"s3://bucket/patience/file: no answer .*the same command resumes"):
            store.write("file", b"")
        with pytest.raises(StoreError, match="part-00000"):  # not taken for a damaged file
            read_columns(store, "attack", [part], "f0", ["margin"])
        with pytest.raises(StoreError, match="part-00000"):
            finished_rows(store, f"attack/f0/{part.file_name}", "f0", part)
    finally:
        object_store.restart()
    assert read_columns(Store(store.uri), "attack", [part], "f0", ["margin"])


@pytest.mark.parametrize(
    ("changes", "bucket", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong0wrong0wrong"}, "bucket", "access denied .*Check the credentials"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "bucket", "access denied .*Check the credentials"),
        ({}, "no-such-bucket", "s3://no-such-bucket: there is no such place .*Create the bucket"),
        ({"AWS_ENDPOINT_URL": "http://nowhere.invalid:9000"}, "bucket", "Correct AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "nowhere"}, "bucket", "Invalid endpoint"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "bucket", "no usable credentials .*AWS_PROFILE"),
        ({"AWS_PROFILE": "nobodys"}, "bucket", "no usable credentials .*nobodys"),
    ],
)
def test_what_waiting_cannot_help_is_told_at_once(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], bucket: str,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(outages.time, "sleep", lambda _: pytest.fail("it waits"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=message) as caught:
        Store(f"s3://{bucket}/run").write("file", b"")
    for secret in (object_store.secret, "wrong0wrong0wrong"):
        assert secret not in str(caught.value)


def test_an_empty_file_exists(object_store: ObjectStore, tmp_path: Path) -> None:
    """Another program may have truncated a file."""
    for store in (Store(object_store.uri("empty")), Store(str(tmp_path))):
        assert not store.exists("run.yaml")
        store.write("run.yaml", b"")
        assert store.exists("run.yaml")
        assert store.read("run.yaml") == b""

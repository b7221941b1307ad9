"""The store: whole files or none, relative paths only."""

import errno
import os
import time
from pathlib import Path

import pytest

from mixednuts_dist.errors import MissingArtifact, StoreError
from mixednuts_dist.storage.store import Store, concurrently
from tests.helpers.stored_rows import checksum, quarantined


@pytest.fixture(params=["folder", "bucket", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A folder, a bucket on a real server, and any other file system of fsspec."""
    if request.param == "bucket":
        return Store(request.getfixturevalue("object_store").uri(f"{tmp_path.name}/runs")).child("run-1")
    return Store(str(tmp_path / "runs") if request.param == "folder" else f"memory://{tmp_path.name}").child("run-1")


def test_files_come_back_as_they_were_written(store: Store) -> None:
    store.write("attack/file", b"one")
    store.write("attack/file", b"twenty-two")
    assert store.read("attack/file") == b"twenty-two"
    assert store.read("attack/file", -3) == b"two"
    assert store.read("attack/file", -1000) == b"twenty-two"
    assert store.read("attack/file", 6, 9) == b"-tw"
    assert store.names("attack") == ["file"]
    assert store.names("") == ["attack"]
    store.delete("attack/file")
    store.delete("attack/file")
    assert not store.exists("attack/file")
    assert store.names("attack") == []
    with pytest.raises(MissingArtifact, match=r"run-1/attack/file does not exist"):
        store.read("attack/file")


def test_create_leaves_what_is_there(store: Store) -> None:
    assert store.create("a/file", b"first")
    assert not store.create("a/file", b"second")
    assert store.read("a/file") == b"first"


def test_set_aside_keeps_bytes_under_a_new_name(store: Store) -> None:
    for content in (b"one", b"two"):
        store.write("file", content)
        assert store.set_aside("file", checksum(content)) == quarantined("file", content)
        assert store.read(quarantined("file", content)) == content
    assert store.all_files() == []
    assert store.set_aside("file", checksum(b"two")) is None
    store.write("file", b"whole")
    assert store.set_aside("file", checksum(b"two")) is None
    assert store.read("file") == b"whole"


def test_sizes_come_with_one_listing(store: Store) -> None:
    store.write("a/one", b"1")
    store.write("a/below/three", b"333")
    store.write("two", b"22")
    assert store.sizes("a") == {"below": None, "one": 1}
    assert store.sizes("nowhere") == {}
    assert store.all_files() == ["a/below/three", "a/one", "two"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    store.write("a/file", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mixednuts_dist.storage.store.os.fsync", full)
    with pytest.raises(StoreError, match=r"a/file: the disk is full .*Free some space and run the same command again"):
        store.write("a/file", b"new")
    assert store.read("a/file") == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_drafts_are_not_listed_and_swept_when_old(tmp_path: Path) -> None:
    """A draft that is older than any write takes has no writer. No draft is listed."""
    old, new = tmp_path / ".tmp-old", tmp_path / ".tmp-new"
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    store = Store(str(tmp_path))
    assert store.names("") == store.all_files() == []
    store.sweep()
    assert list(tmp_path.iterdir()) == [new]


def test_a_shared_folder_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, fsync, failures = Store(str(tmp_path)), os.fsync, iter(range(2))

    def flaky(descriptor: int) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        fsync(descriptor)

    monkeypatch.setattr("mixednuts_dist.storage.store.os.fsync", flaky)
    assert store.create("a/file", b"whole")
    assert store.read("a/file") == b"whole"
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


@pytest.mark.parametrize("store", ["folder", "bucket"], indirect=True)
def test_of_many_writers_of_a_new_file_exactly_one_wins(store: Store) -> None:
    contents = [bytes([i]) * 100_000 for i in range(16)]
    for round_ in range(5):
        won = concurrently(lambda content, path=f"a/file-{round_}": Store(store.uri).create(path, content), contents)
        assert sum(won) == 1
        assert store.read(f"a/file-{round_}") == contents[won.index(True)]
    assert len(store.names("a")) == 5


def test_one_writer_wins_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("mixednuts_dist.storage.store.os.link", refuse)
    test_of_many_writers_of_a_new_file_exactly_one_wins(Store(str(tmp_path)))
    assert len(list((tmp_path / "a").iterdir())) == 5, "no drafts are left"


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_no_path_leads_out_of_the_root(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match="leads out of the storage root"):
        Store(str(tmp_path)).read(path)


def test_a_relative_folder_is_pinned_to_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    monkeypatch.chdir("/")
    store.write("x", b"1")
    assert (tmp_path / "runs" / "x").read_bytes() == b"1"
    assert Store(store.uri).read("x") == b"1"


def test_require_writable_leaves_no_file(tmp_path: Path) -> None:
    Store(str(tmp_path / "runs" / "run-1")).require_writable()
    Store("memory://writable/run-1").require_writable()
    assert not list(tmp_path.iterdir())
    assert not Store("memory://writable").all_files()

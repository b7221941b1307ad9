"""The store: whole files or none, relative paths only."""

from pathlib import Path

import pytest

from mixednuts_dist.data.store import Store
from mixednuts_dist.errors import MissingArtifact, StoreError


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "runs"))
    store.write("attack/part-00000.parquet", b"one")
    store.write("attack/part-00000.parquet", b"two")
    assert store.read("attack/part-00000.parquet") == b"two"
    assert store.names("attack") == ["part-00000.parquet"]
    assert store.exists("attack/part-00000.parquet")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    store.write("a/file", b"old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("mixednuts_dist.data.store.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.write("a/file", b"new")
    assert store.read("a/file") == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_half_written_files_are_not_listed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("a/file", b"x")
    (tmp_path / "a" / "file.tmp-0123").write_bytes(b"half")
    assert store.names("a") == ["file"]


def test_folders_that_are_not_there_are_empty(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.names("nothing") == []
    store.delete("nothing/here")
    with pytest.raises(MissingArtifact, match="nothing/here does not exist"):
        store.read("nothing/here")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_no_path_leads_out_of_the_root(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match="leads out of the storage root"):
        Store(str(tmp_path)).read(path)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(StoreError, match="nope://bucket"):
        Store("nope://bucket")


def test_a_relative_folder_is_pinned_to_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    monkeypatch.chdir("/")
    store.write("x", b"1")
    assert (tmp_path / "runs" / "x").read_bytes() == b"1"
    assert Store(store.uri).read("x") == b"1"

"""The index: one read tells what is done; a lost, damaged or outdated index costs time and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mixednuts_dist.storage import index
from mixednuts_dist.storage.damage import verify
from mixednuts_dist.storage.index import IndexWriter, finished_files
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.records import PartitionSummary
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import create_whole
from tests.helpers.stored_rows import content_of, quarantined, summary, write_stage

PARTS = split_images(20, 3)
PATH = "attack/f0/_index.json"


def write(store: Store, part: Partition) -> PartitionSummary:
    content = content_of(part)
    store.write(f"attack/f0/{part.file_name}", content)
    return replace(summary(part), n_bytes=len(content))


@pytest.fixture
def store(uri: str) -> Store:
    """All partitions written, and an index of them."""
    made = Store(uri)
    list(write_stage(made, PARTS))
    return made


def opened_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths whose content is read from now on."""
    opened: list[str] = []
    real = store.read
    monkeypatch.setattr(store, "read", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    return opened


def entries(store: Store) -> list[int]:
    return [entry["partition"] for entry in json.loads(store.read(PATH))["entries"]]


def test_what_is_done_is_one_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: summary(part) for part in PARTS}
    assert opened == [PATH]


@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_without_a_usable_index_the_footers_are_read(store: Store, damage: str) -> None:
    content = json.loads(store.read(PATH))
    if damage == "lost":
        store.delete(PATH)
    elif damage == "cut":
        store.write(PATH, store.read(PATH)[:-9])
    else:
        store.write(PATH, json.dumps({**content, "entries": []}).encode())
    before = store.all_files()
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: summary(part) for part in PARTS}
    assert store.all_files() == before, "looking writes nothing"
    IndexWriter(store, "attack", "f0", found).flush()
    assert entries(store) == list(range(len(PARTS)))


def test_files_that_came_went_or_shrank_since_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    came, went, shrank = Partition(7, 20, 23), PARTS[0], PARTS[1]
    write(store, came)
    store.delete(f"attack/f0/{went.file_name}")
    path = f"attack/f0/{shrank.file_name}"
    cut = store.read(path)[:-40]
    store.write(path, cut)
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", [*PARTS, came], "f0")
    assert [part.index for part in found] == [2, 3, 4, 5, 6, 7]
    assert len(opened) == 3, "the index and the footers of the two files that differ from it"
    assert create_whole(store, path, content_of(shrank), "f0", shrank) is None
    assert (store.read(path), store.read(quarantined(path, cut))) == (content_of(shrank), cut)


def test_two_drivers_at_a_time_lose_no_entry(store: Store) -> None:
    more = [Partition(7, 20, 23), Partition(8, 23, 26)]
    found = finished_files(store, "attack", PARTS, "f0")
    writers = [IndexWriter(store, "attack", "f0", found) for _ in more]
    for writer, part in zip(writers, more, strict=True):
        writer.add(write(store, part))
        writer.flush()
    assert entries(store) == list(range(len(PARTS) + 2))


def test_verify_reads_every_byte_and_repair_sets_aside(store: Store) -> None:
    """One bit in each file in turn."""
    assert verify(store) == ({}, len(store.all_files()))
    for path in store.all_files():
        whole = store.read(path)
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 2
        store.write(path, bytes(changed))
        bad, _ = verify(store)
        assert list(bad) == [path]
        assert store.set_aside(path, bad[path].sha256) == quarantined(path, bytes(changed))
        assert verify(store)[0] == {}
        store.write(path, whole)


def test_a_driver_writes_the_index_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_SECONDS_BETWEEN", 0.0)
    store = Store(str(tmp_path))
    writer = IndexWriter(store, "attack", "f0", {})
    for i, part in enumerate(PARTS[:3]):
        writer.add(write(store, part))
        assert entries(store) == list(range(i + 1))

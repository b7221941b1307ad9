"""The index: one read tells what is done; a lost, damaged or outdated index costs time and nothing else."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mixednuts_dist.storage import index
from mixednuts_dist.storage.damage import create_whole
from mixednuts_dist.storage.index import IndexWriter, finished_files, repair, verify, with_checksum
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.records import PartitionSummary
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import encode_table
from tests.helpers.object_store import ObjectStore
from tests.helpers.stored_rows import columns, quarantined, summary

PARTS = split_images(20, 3)
PATH = "attack/f0/_index.json"


def write(store: Store, part: Partition, finished: float = 1.0) -> PartitionSummary:
    told = replace(summary(part), finished=finished)
    content = encode_table(columns(part), "f0", told)
    store.write(f"attack/f0/{part.file_name}", content)
    return with_checksum(told, content)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """All partitions written, and an index of them."""
    if request.param == "folder":
        made = Store(str(tmp_path))
    else:
        server: ObjectStore = request.getfixturevalue("object_store")
        made = Store(server.uri(f"index-{tmp_path.name}"))
    writer = IndexWriter(made, "attack", "f0", {})
    for part in PARTS:
        writer.add(write(made, part))
    writer.flush()
    yield made


def opened_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths whose content is read from now on."""
    opened: list[str] = []
    for name in ("read", "read_tail"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda path, *rest, real=real: (opened.append(path), real(path, *rest))[1])
    return opened


def entries(store: Store) -> list[int]:
    return [entry["partition"] for entry in json.loads(store.read(PATH))["entries"]]


def test_what_is_done_is_one_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: replace(summary(part), finished=1.0) for part in PARTS}
    assert all(one.sha256 and one.n_bytes for one in found.values())
    assert opened == [PATH]


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "newer", "another run"])
def test_without_a_usable_index_the_footers_are_read(store: Store, damage: str) -> None:
    content = json.loads(store.read(PATH))
    if damage == "lost":
        store.delete(PATH)
    elif damage == "cut":
        store.write(PATH, store.read(PATH)[:-9])
    else:
        changes = {"changed": {"entries": []}, "newer": {"schema_version": 99}, "another run": {"content_hash": "f1"}}
        store.write(PATH, json.dumps({**content, **changes[damage]}).encode())
    before = store.all_files()
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: replace(summary(part), finished=1.0) for part in PARTS}
    assert store.all_files() == before, "looking writes nothing"
    IndexWriter(store, "attack", "f0", found).flush()
    assert entries(store) == list(range(len(PARTS)))


def test_a_listing_by_stems_is_that_of_the_folder(store: Store) -> None:
    """A thousand partitions have a stem in common: that is what an object store lists in one request."""
    far = Partition(1000, 20, 23)
    write(store, far)
    store.write("attack/f0/below/part-01000-20-21.parquet", b"below")
    every = store.sizes("attack/f0")
    assert set(every) - {"_index.json"} == {part.file_name for part in (*PARTS, far)}
    assert {**every, **store.sizes("attack/f0", {part.stem for part in (*PARTS, far)})} == every
    assert far.file_name in store.sizes("attack/f0", {far.stem})
    assert store.sizes("nowhere", {far.stem}) == {}


def test_files_that_came_went_or_shrank_since_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    came, went, shrank = Partition(7, 20, 23), PARTS[0], PARTS[1]
    write(store, came)
    store.delete(f"attack/f0/{went.file_name}")
    path = f"attack/f0/{shrank.file_name}"
    store.write(path, store.read(path)[:-40])
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", [*PARTS, came], "f0")
    assert [part.index for part in found] == [2, 3, 4, 5, 6, 7]
    assert len(opened) == 3, "the index and the footers of the two files that differ from it"
    whole = encode_table(columns(shrank), "f0", summary(shrank))
    assert create_whole(store, path, whole, "f0", shrank) is None
    assert (store.read(path), store.exists(quarantined(path))) == (whole, True)


def test_two_drivers_at_a_time_lose_no_entry(store: Store) -> None:
    more = [Partition(7, 20, 23), Partition(8, 23, 26)]
    found = finished_files(store, "attack", PARTS, "f0")
    writers = [IndexWriter(store, "attack", "f0", found) for _ in more]
    for writer, part in zip(writers, more, strict=True):
        writer.add(write(store, part))
        writer.flush()
    assert entries(store) == list(range(len(PARTS) + 2))


def test_a_file_that_another_driver_replaced_is_not_damaged(store: Store) -> None:
    """The second file has the same size and other seconds, and the index still has the entry of the first one."""
    before = store.read(PATH)
    write(store, PARTS[0], finished=2.0)
    assert store.read(PATH) == before
    assert verify(store)[0] == []


def test_verify_reads_every_byte_and_repair_sets_aside(store: Store) -> None:
    """One bit in each file in turn, wherever it is; without its entry a file's own checksums find most of them."""
    assert verify(store) == ([], len(store.all_files()))
    for path in store.all_files():
        whole = store.read(path)
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 2
        store.write(path, bytes(changed))
        bad, _ = verify(store)
        assert [damage.path for damage in bad] == [path], path
        store.write(path, whole)
    path = f"attack/f0/{PARTS[2].file_name}"
    store.write(path, store.read(path)[:-1])
    bad, _ = verify(store)
    assert repair(store, bad) == [quarantined(path)]
    assert verify(store)[0] == []


def test_a_driver_writes_the_index_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_SECONDS_BETWEEN", 0.0)
    store = Store(str(tmp_path))
    writer = IndexWriter(store, "attack", "f0", {})
    for i, part in enumerate(PARTS[:3]):
        writer.add(write(store, part))
        writer._due = 0.0
        assert entries(store) == list(range(i + 1))


def test_verify_checks_tables_without_an_index(tmp_path: Path) -> None:
    store, part = Store(str(tmp_path)), PARTS[0]
    write(store, part)
    path = tmp_path / "attack" / "f0" / part.file_name
    whole, found = path.read_bytes(), 0
    assert verify(store) == ([], 1)
    for position in range(0, len(whole), 97):
        content = bytearray(whole)
        content[position] ^= 1
        path.write_bytes(content)
        found += bool(verify(store)[0])
    assert found > len(whole) / 97 / 3

"""The manifest: one read says what is done; lost, damaged or outdated ones cost time and nothing else."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mixednuts_dist.errors import FingerprintMismatch
from mixednuts_dist.storage import manifest
from mixednuts_dist.storage.manifest import (
    ManifestWriter,
    finished_files,
    repair,
    set_damaged_aside,
    verify,
    with_checksum,
    write_with_checksums,
)
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.records import Receipt
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import encode_table
from tests.helpers.object_store import ObjectStore
from tests.helpers.stored_rows import columns, receipt

PARTS = split_images(20, 3)


def write(store: Store, part: Partition, finished: float = 1.0) -> Receipt:
    told = replace(receipt(part), finished=finished)
    content = encode_table(columns(part), "f0", told)
    store.write(f"attack/{part.file_name}", content)
    return with_checksum(told, content)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """All partitions written, and a manifest of them."""
    if request.param == "folder":
        made = Store(str(tmp_path))
    else:
        server: ObjectStore = request.getfixturevalue("object_store")
        made = Store(server.uri(f"manifest-{tmp_path.name}"))
    writer = ManifestWriter(made, "attack", "f0", {})
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


def sessions(store: Store) -> list[str]:
    return store.names("attack/manifest")


def test_what_is_done_is_one_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: replace(receipt(part), finished=1.0) for part in PARTS}
    assert all(one.sha256 and one.n_bytes for one in found.values())
    assert opened == [f"attack/manifest/{sessions(store)[0]}"]


@pytest.mark.parametrize("damage", ["lost", "cut", "changed", "newer", "another run"])
def test_without_a_usable_manifest_the_files_are_asked_and_the_next_session_writes_it_anew(
    store: Store, damage: str
) -> None:
    path = f"attack/manifest/{sessions(store)[0]}"
    content = json.loads(store.read(path))
    if damage == "lost":
        store.delete(path)
    elif damage == "cut":
        store.write(path, store.read(path)[:-9])
    else:
        changes = {"changed": {"entries": []}, "newer": {"schema_version": 2}, "another run": {"fingerprint": "f1"}}
        store.write(path, json.dumps({**content, **changes[damage]}).encode())
    before = store.all_files()
    found = finished_files(store, "attack", PARTS, "f0")
    assert found == {part: replace(receipt(part), finished=1.0) for part in PARTS}
    assert store.all_files() == before, "looking writes nothing"
    ManifestWriter(store, "attack", "f0", found).flush()
    assert len(manifest._known(store, "attack", "f0", sessions(store))) == len(PARTS)
    assert (path in store.all_files()) == (damage == "newer"), "a newer release's manifest is not ours to delete"


def test_a_listing_by_stems_is_that_of_the_folder(store: Store) -> None:
    """A thousand partitions have a stem in common: that is what an object store lists in one request."""
    far = Partition(1000, 20, 23)
    write(store, far)
    store.write("attack/below/part-01000-20-21.parquet", b"below")
    every = store.sizes("attack")
    assert set(every) == {part.file_name for part in (*PARTS, far)}
    assert store.sizes("attack", {part.stem for part in (*PARTS, far)}) == every
    assert far.file_name in store.sizes("attack", {far.stem})
    assert store.sizes("nowhere", {far.stem}) == {}


def test_files_that_came_went_or_shrank_since_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    came, went, shrank = Partition(7, 20, 23), PARTS[0], PARTS[1]
    write(store, came)
    store.delete(f"attack/{went.file_name}")
    path = f"attack/{shrank.file_name}"
    store.write(path, store.read(path)[:-40])
    opened = opened_files(store, monkeypatch)
    found = finished_files(store, "attack", [*PARTS, came], "f0")
    assert [part.index for part in found] == [2, 3, 4, 5, 6, 7]
    assert len(opened) == 3, "the manifest and the footers of the two that are not as it says"
    assert set_damaged_aside(store, "attack", [went, shrank]) == [f"{path}.bad-1"]
    assert shrank.file_name not in store.names("attack")


def test_two_sessions_at_a_time_lose_nothing(store: Store) -> None:
    more = [Partition(7, 20, 23), Partition(8, 23, 26)]
    found = finished_files(store, "attack", PARTS, "f0")
    writers = [ManifestWriter(store, "attack", "f0", found) for _ in more]
    for writer, part in zip(writers, more, strict=True):
        writer.add(write(store, part))
        writer.flush()
    assert len(sessions(store)) == 2
    assert len(manifest._known(store, "attack", "f0", sessions(store))) == len(PARTS) + 2
    everything = finished_files(store, "attack", [*PARTS, *more], "f0")
    ManifestWriter(store, "attack", "f0", everything).flush()
    assert len(sessions(store)) == 1


def test_a_session_without_news_writes_nothing(store: Store) -> None:
    before = store.all_files()
    ManifestWriter(store, "attack", "f0", finished_files(store, "attack", PARTS, "f0")).flush()
    assert store.all_files() == before


@pytest.mark.parametrize("clock", [-1200.0, 1200.0])
def test_of_two_entries_of_a_file_the_file_says_which_counts(store: Store, clock: float) -> None:
    """As of two drivers whose clocks are 20 minutes apart; the second one's file is there."""
    again = write(store, PARTS[0], finished=1.0 + clock)
    writer = ManifestWriter(store, "attack", "f0", {})
    writer._replaces = []
    writer.add(again)
    writer.flush()
    found = finished_files(store, "attack", PARTS, "f0")
    assert found[PARTS[0]] == again
    assert verify(store)[0] == []
    ManifestWriter(store, "attack", "f0", found).flush()  # the next session
    assert len(sessions(store)) == 1
    assert verify(store)[0] == []


def test_rows_of_another_run_are_refused(store: Store) -> None:
    with pytest.raises(FingerprintMismatch, match="belongs to fingerprint f0, this run is f1"):
        finished_files(store, "attack", PARTS, "f1")


def test_verify_reads_every_byte_and_repair_sets_aside(store: Store) -> None:
    """One bit in each file in turn, wherever it is; without its entry a file's own checksums find most of them."""
    write_with_checksums(store, "report", {"index.html": b"<html>", "table.csv": b"1,2"})
    assert verify(store) == ([], len(store.all_files()))
    for path in store.all_files():
        whole = store.read(path)
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 2
        store.write(path, bytes(changed))
        bad, _ = verify(store)
        assert [damage.path for damage in bad] == [path], path
        store.write(path, whole)
    path = f"attack/{PARTS[2].file_name}"
    store.write(path, store.read(path)[:-1])
    bad, _ = verify(store)
    assert repair(store, bad) == [f"{path}.bad-1"]
    assert verify(store)[0] == []


def test_a_table_without_a_manifest_is_held_against_its_own_checksums(tmp_path: Path) -> None:
    store, part = Store(str(tmp_path)), PARTS[0]
    write(store, part)
    path = tmp_path / "attack" / part.file_name
    whole, found = path.read_bytes(), 0
    assert verify(store) == ([], 1)
    for position in range(0, len(whole), 97):
        content = bytearray(whole)
        content[position] ^= 1
        path.write_bytes(content)
        found += bool(verify(store)[0])
    assert found > len(whole) / 97 / 3


def test_a_driver_writes_its_manifest_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_SECONDS_BETWEEN", 0.0)
    store = Store(str(tmp_path))
    writer = ManifestWriter(store, "attack", "f0", {})
    for i, part in enumerate(PARTS[:3]):
        writer.add(write(store, part))
        writer._due = 0.0
        assert len(manifest._known(store, "attack", "f0", sessions(store))) == i + 1
        assert len(sessions(store)) == 1

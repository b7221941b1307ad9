"""Two drivers of one run at the same stage: whatever one has written whole, the other leaves where it is."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mixednuts_dist.storage.index import finished_files
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import create_whole
from tests.helpers.stored_rows import checksum, content_of, quarantined, write_stage

PARTS = split_images(12, 3)


def drive(uri: str, seed: int) -> None:
    """Write a stage's partitions in any order, with delays in between."""
    draw = random.Random(seed)
    for _ in write_stage(Store(uri), draw.sample(PARTS, len(PARTS))):
        time.sleep(draw.uniform(0, 0.02))


@pytest.mark.parametrize("seed", range(4))
def test_whole_files_are_never_renamed_by_another_driver(uri: str, seed: int) -> None:
    """One partition is damaged from the start; one driver quarantines it."""
    damaged, store = f"attack/f0/{PARTS[1].file_name}", Store(uri)
    store.write(damaged, content_of(PARTS[1])[:-9])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda driver: drive(uri, 2 * seed + driver), range(2)))
    (kept,) = [f"attack/f0/{name}" for name in store.names("attack/f0") if ".bad-" in name]
    assert kept == quarantined(damaged, content_of(PARTS[1])[:-9])
    assert store.read(kept) == content_of(PARTS[1])[:-9]
    for part in PARTS:
        assert store.read(f"attack/f0/{part.file_name}") == content_of(part)
    assert list(finished_files(store, "attack", PARTS, "f0")) == PARTS


def test_of_many_that_set_one_damaged_file_aside_one_does(uri: str) -> None:
    store, path = Store(uri), f"attack/f0/{PARTS[0].file_name}"
    for n in range(1, 4):
        store.write(path, bytes(n))
        start = threading.Barrier(6)

        def race(i: int, n: int = n, start: threading.Barrier = start) -> str | None:
            own = Store(uri)
            start.wait()
            if i % 2:
                create_whole(own, path, content_of(PARTS[0]), "f0", PARTS[0])
                return None
            return own.set_aside(path, checksum(bytes(n)))

        with ThreadPoolExecutor(6) as threads:
            aside = [found for found in threads.map(race, range(6)) if found]
        assert aside in ([quarantined(path, bytes(n))], [])
        assert store.read(path) == content_of(PARTS[0])
        assert store.read(quarantined(path, bytes(n))) == bytes(n)
        assert len(store.names("attack/f0")) == n + 1
        store.delete(path)

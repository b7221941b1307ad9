"""Parquet files keep every bit, and rows of another run, schema or partition raise."""

from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
import torch

from mixednuts_dist.errors import ContentHashMismatch, DamagedFile
from mixednuts_dist.storage.index import IndexWriter, finished_files
from mixednuts_dist.storage.partitions import Partition, split_images
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import create_whole, finished_rows, read_columns, table_problem
from tests.helpers.stored_rows import checksum, columns, content_of, quarantined, summary


def written(place: Path | str) -> tuple[Store, list[Partition]]:
    store, parts = Store(str(place)), split_images(7, 3)
    for part in parts:
        store.write(f"attack/f0/{part.file_name}", content_of(part))
    return store, parts


def test_bits_and_shapes_round_trip(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    found = read_columns(store, "attack", parts, "f0", list(columns(parts[0])))
    for name, values in found.items():
        expected = torch.cat([columns(part)[name] for part in parts])
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected)


def test_sample_opens_only_the_files_that_hold_it(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    store.write(f"attack/f0/{parts[1].file_name}", b"damaged")
    sample = torch.tensor([0, 2, 6])
    found = read_columns(store, "attack", parts, "f0", ["sample_id", "margin"], sample_ids=sample)
    every = torch.cat([columns(part)["margin"] for part in parts])
    assert torch.equal(found["sample_id"], sample)
    assert torch.equal(found["margin"], every[sample])


def test_a_stage_folder_is_a_parquet_dataset_for_other_tools(uri: str) -> None:
    """The index and quarantined files begin with an underscore, which pyarrow, pandas, Spark and DuckDB ignore."""
    store, parts = written(uri)
    path = f"attack/f0/{parts[1].file_name}"
    whole = store.read(path)
    store.write(path, whole[:-9])
    assert create_whole(store, path, whole, "f0", parts[1]) is None
    IndexWriter(store, "attack", "f0", finished_files(store, "attack", parts, "f0")).flush()
    assert len(store.names("attack/f0")) == len(parts) + 2
    fs, root = fsspec.core.url_to_fs(f"{uri}/attack/f0")
    table = pq.read_table(root, filesystem=fs)
    assert sorted(table["sample_id"].to_pylist()) == [*range(7)]
    assert table["logits"].type.list_size == 10


def test_a_truncated_file_is_named_counts_as_missing_and_stays(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    path = f"attack/f0/{parts[0].file_name}"
    cut = store.read(path)[:-20]
    store.write(path, cut)
    assert finished_rows(store, path, "f0", parts[0]) is None
    with pytest.raises(
        DamagedFile, match=r"part-00000\.parquet is damaged .*quarantines it and computes it again"
    ) as told:
        read_columns(store, "attack", parts, "f0", ["margin"])
    assert (told.value.address, told.value.sha256) == (store.address(path), checksum(cut))
    assert store.names("attack/f0") == [part.file_name for part in parts]
    assert store.set_aside(path, told.value.sha256) == quarantined(path, cut)
    assert not store.exists(path)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Flip a bit of every byte in turn: the rows and the summary are as written, or the file counts as damaged.

    Without an index, the file's own checksums must suffice. A damaged file is quarantined and recomputed.
    """
    store, (part, *_) = written(tmp_path)
    path, expected = f"attack/f0/{part.file_name}", columns(part)
    whole = store.read(path)
    noticed = 0
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << position % 8
        (tmp_path / path).write_bytes(content)
        assert table_problem(content), position
        told = finished_rows(store, path, "f0", part)
        try:
            found = None if told is None else read_columns(store, "attack", [part], "f0", list(expected))
        except DamagedFile:
            found = None
        if found is None:
            noticed += 1
            if position % 10 == 0:  # each writes a file to the disk
                assert create_whole(store, path, whole, "f0", part) is None, position
                store.delete(quarantined(path, bytes(content)))
            continue
        assert told == summary(part), position
        assert all(torch.equal(found[name], values) for name, values in expected.items()), position
    assert noticed > len(whole) / 3


def test_a_few_rows_come_from_their_row_groups(tmp_path: Path) -> None:
    store, part = Store(str(tmp_path)), Partition(0, 100, 250)
    store.write(f"attack/f0/{part.file_name}", content_of(part))
    for rows in ([0, 16, 149], [40], [127, 128]):
        found = read_columns(store, "attack", [part], "f0", ["x_adv", "margin"], sample_ids=torch.tensor(rows) + 100)
        assert all(torch.equal(values, columns(part)[name][rows]) for name, values in found.items())


@pytest.mark.parametrize(
    ("content_hash", "index", "column", "told"),
    [
        ("f0", 0, "newer", r"part-00000\.parquet is not what this run needs: .*newer"),
        ("f0", 1, "margin", r"does not hold partition 0 \(images 0-2\)"),
        ("f1", 0, "margin", r"does not hold partition 0 \(images 0-2\) of f1"),
    ],
    ids=["column", "partition", "run"],
)
def test_rows_of_something_else_are_refused(
    tmp_path: Path, content_hash: str, index: int, column: str, told: str
) -> None:
    store, parts = written(tmp_path)
    content = store.read(f"attack/f0/{parts[index].file_name}")
    path = f"attack/{content_hash}/{parts[0].file_name}"
    store.write(path, content)
    with pytest.raises(ContentHashMismatch, match=told):
        read_columns(store, "attack", parts[:1], content_hash, [column])
    assert store.read(path) == content

"""Prepared parts: round trip, order, and damage that is named."""

from pathlib import Path

import numpy as np
import pytest

from mixednuts_dist.errors import DatasetError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.images.parquet_images import (
    MANIFEST,
    ImagePart,
    ImageRows,
    Manifest,
    balanced_order,
    decode_part,
    encode_part,
)
from mixednuts_dist.storage.store import Store

SIZES = (5, 5, 3)


@pytest.fixture
def prepared(tmp_path: Path) -> np.ndarray:
    """The pixels of 13 images, which `tmp_path` holds in three parts."""
    pixels = np.random.default_rng(1).integers(0, 256, (13, 3, 4, 6), np.uint8)
    store, parts, start = Store(str(tmp_path)), [], 0
    for i, size in enumerate(SIZES):
        stop = start + size
        rows = ImageRows(pixels[start:stop], np.arange(start, stop), tuple(f"n/{j}" for j in range(start, stop)))
        store.write(f"part-{i:05d}.parquet", encode_part(rows, "f"))
        parts.append(ImagePart(f"part-{i:05d}.parquet", start, stop, rows.sha256))
        start = stop
    manifest = Manifest(
        source="npz:x", content_hash="f", seed=0, image_shape=(3, 4, 6), parts=tuple(parts), labels=tuple(range(13))
    )
    store.write(MANIFEST, manifest.model_dump_json().encode())
    return pixels


def test_any_slice_across_the_parts_is_what_was_written(prepared: np.ndarray, tmp_path: Path) -> None:
    data = open_dataset(f"parquet:{tmp_path}")
    assert len(data) == 13
    for start in range(13):
        for stop in range(start, 14):
            images, labels = data.read(start, stop)
            assert np.array_equal(images.mul(255).round().byte().numpy(), prepared[start:stop])
            assert labels.tolist() == list(range(start, stop))


@pytest.mark.usefixtures("prepared")
def test_checksum_reads_only_the_manifest(tmp_path: Path) -> None:
    uri, manifest = f"parquet:{tmp_path}", tmp_path / MANIFEST
    sums = [open_dataset(uri).checksum(n) for n in (5, 6, 13)]
    assert len(set(sums)) == 3
    (tmp_path / "part-00001.parquet").unlink()
    assert open_dataset(uri).checksum(13) == sums[2]
    sha = Manifest.model_validate_json(manifest.read_text()).parts[0].sha256
    manifest.write_text(manifest.read_text().replace(sha, "0" * 64))
    assert open_dataset(uri).checksum(5) != sums[0]


@pytest.mark.parametrize("harm", ["truncated", "gone", "foreign"])
@pytest.mark.usefixtures("prepared")
def test_a_damaged_part_is_named_and_the_others_are_read(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "part-00001.parquet"
    if harm == "gone":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.write_bytes((tmp_path / "part-00000.parquet").read_bytes())
    data = open_dataset(f"parquet:{tmp_path}")
    assert data.read(0, 5)[0].shape == (5, 3, 4, 6)
    with pytest.raises(DatasetError, match=r"part-00001\.parquet \(images 5-9\) is missing or .*mixednuts prepare"):
        data.read(4, 6)


def test_every_changed_bit_of_the_pixels_is_noticed() -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (2, 3, 16, 16), np.uint8)
    content = encode_part(ImageRows(pixels, np.arange(2), ("a", "b")), "f")
    start = len(content) // 3  # amid the pixels, which make up nearly all of the file
    for place in range(start, start + 64):
        broken = bytearray(content)
        broken[place] ^= 1 << (place % 8)
        with pytest.raises((OSError, ValueError)):
            decode_part(bytes(broken))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mixednuts prepare URI --to"),
        ("{}", "Run mixednuts prepare again"),
        ("{", "Invalid JSON"),
    ],
)
def test_set_without_a_usable_manifest_says_how_to_make_one(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DatasetError, match=message):
        open_dataset(f"parquet:{tmp_path}")


@pytest.mark.parametrize("counts", [[100] * 10, [1, 5, 300, 44], [50] * 1000])
def test_balanced_order_mixes_classes_everywhere(counts: list[int]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.array(balanced_order(labels, seed=3))
    n, width = len(labels), max(len(labels) // 7, 1)
    assert sorted(order) == list(range(n))
    for start in range(0, n - width, width // 2 or 1):
        there = np.bincount(labels[order[start : start + width]], minlength=len(counts))
        assert np.abs(there - np.array(counts) * width / n).max() <= 2


def test_the_order_is_the_seed_s_and_no_library_s() -> None:
    labels = [0, 1, 0, 1, 2, 0, 1, 0]
    assert balanced_order(labels, 0) != balanced_order(labels, 1)
    assert balanced_order(labels, 0) == [6, 2, 3, 0, 5, 4, 1, 7]

"""Parquet: bits come back, and rows of another run, schema or partition are refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mixednuts_dist.data.partitions import Partition, split_images
from mixednuts_dist.data.records import Receipt
from mixednuts_dist.data.store import Store
from mixednuts_dist.data.tables import encode_table, read_columns, read_footer
from mixednuts_dist.errors import FingerprintMismatch, MissingArtifact


def receipt(part: Partition) -> Receipt:
    return Receipt("attack", part.index, part.start, part.stop, 1, 1, 0.5, 10, 9, "node")


def columns(part: Partition) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(part.index)
    n = len(part)
    return {
        "sample_id": torch.arange(part.start, part.stop),
        "logits": torch.randn(n, 10, generator=generator),
        "margin": torch.randn(n, dtype=torch.float64, generator=generator),
        "broken": torch.rand(n, generator=generator) > 0.5,
        "x_adv": torch.rand(n, 1, 4, 5, generator=generator),
    }


def written(tmp_path: Path, fingerprint: str = "f0") -> tuple[Store, list[Partition]]:
    store, parts = Store(str(tmp_path)), split_images(7, 3)
    for part in parts:
        store.write(f"attack/{part.file_name}", encode_table(columns(part), fingerprint, receipt(part)))
    return store, parts


def test_bits_and_shapes_round_trip(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    found = read_columns(store, "attack", parts, "f0", list(columns(parts[0])))
    for name, values in found.items():
        expected = torch.cat([columns(part)[name] for part in parts])
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected)


def test_the_same_rows_give_the_same_bytes() -> None:
    part = split_images(3, 3)[0]
    assert encode_table(columns(part), "f0", receipt(part)) == encode_table(columns(part), "f0", receipt(part))


def test_the_footer_carries_the_receipt(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    footer = read_footer(store, f"attack/{parts[1].file_name}")
    assert footer is not None
    assert (footer.fingerprint, footer.receipt) == ("f0", receipt(parts[1]))


def test_rows_of_another_run_are_refused_with_both_fingerprints(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    with pytest.raises(FingerprintMismatch, match="belongs to fingerprint f0, this run is f1"):
        read_columns(store, "attack", parts, "f1", ["margin"])


def test_a_truncated_file_is_named_and_counts_as_missing(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    path = f"attack/{parts[0].file_name}"
    store.write(path, store.read(path)[:-20])
    assert read_footer(store, path) is None
    with pytest.raises(FingerprintMismatch, match=r"part-00000\.parquet is damaged"):
        read_columns(store, "attack", parts, "f0", ["margin"])


def test_a_missing_partition_is_named(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    store.delete(f"attack/{parts[2].file_name}")
    with pytest.raises(MissingArtifact, match=r"part-00002\.parquet"):
        read_columns(store, "attack", parts, "f0", ["margin"])


def test_rows_of_another_partition_are_refused(tmp_path: Path) -> None:
    store, parts = written(tmp_path)
    store.write(f"attack/{parts[0].file_name}", store.read(f"attack/{parts[1].file_name}"))
    with pytest.raises(FingerprintMismatch, match=r"does not hold partition 0 \(images 0-2\)"):
        read_columns(store, "attack", parts, "f0", ["sample_id"])

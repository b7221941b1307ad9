"""Small synthetic rows of a partition, and their summary."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mixednuts_dist.storage.index import IndexWriter, finished_files
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import PartitionSummary
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import create_whole, encode_table


def summary(part: Partition) -> PartitionSummary:
    return PartitionSummary("attack", part.index, part.start, part.stop, 1, 1, 0.5, 10, 9, "node")


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


def content_of(part: Partition, content_hash: str = "f0", **changes: Any) -> bytes:
    """Return the file of a partition, with changes in its summary."""
    return encode_table(columns(part), content_hash, replace(summary(part), **changes))


def write_stage(store: Store, parts: Sequence[Partition]) -> Iterator[None]:
    """Write the unfinished partitions and their index as a driver does, which may be killed after each step."""
    finished = finished_files(store, "attack", parts, "f0")
    writer = IndexWriter(store, "attack", "f0", finished)
    yield
    for part in parts:
        if part not in finished:
            content = content_of(part)
            there = create_whole(store, f"attack/f0/{part.file_name}", content, "f0", part)
            writer.add(there or replace(summary(part), n_bytes=len(content)))
            yield
    writer.flush()
    yield


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def quarantined(path: str, content: bytes) -> str:
    """Return the path of `path` after it was quarantined with these bytes."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}_{name}.bad-{checksum(content)[:8]}"

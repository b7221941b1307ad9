"""Partitions, the only unit of work: partition i holds the sample ids `start` .. `stop - 1`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SIZE, _SMALL_SIZE, _SMALL_SET = 32, 16, 512


def rows_folder(stage: str, content_hash: str) -> str:
    """Return the folder of a stage's rows, by the hash of everything that determines them."""
    return f"{stage}/{content_hash}"


@dataclass(frozen=True)
class Partition:
    """Consecutive sample ids, which one worker computes and stores in one file."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def file_name(self) -> str:
        """Return the name of its file in a stage's folder."""
        return f"part-{self.index:05d}.parquet"

    def __str__(self) -> str:
        return f"partition {self.index} (images {self.start}-{self.stop - 1})"


@dataclass(frozen=True)
class Sample:
    """A random sample of `n_drawn` of `n_images` images, the same in every process."""

    n_images: int
    n_drawn: int
    seed: int

    @functools.cache  # noqa: B019  a worker needs the same sample for each partition
    def ids(self) -> Tensor:
        """Return the sample ids in ascending order."""
        import torch  # commands that only look at a run do not import PyTorch

        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.n_images, generator=generator)[: self.n_drawn].sort().values


def rows_among(sample_ids: Tensor, partition: Partition) -> Tensor:
    """Return which rows of a partition have one of these sample ids (in ascending order), as numbers from 0."""
    first, last = sample_ids.numpy().searchsorted([partition.start, partition.stop]).tolist()
    return sample_ids[first:last] - partition.start


def partition_size_of(n_images: int, configured: int | None) -> int:
    """Return the configured number of images per partition or, by default, 32, and 16 for up to 512 images."""
    return configured or (_SMALL_SIZE if n_images <= _SMALL_SET else _SIZE)


def split_images(n_images: int, partition_size: int) -> list[Partition]:
    """Cut images 0 .. n_images - 1 into partitions of `partition_size`; the last one may be shorter."""
    starts = range(0, n_images, partition_size)
    return [Partition(i, start, min(start + partition_size, n_images)) for i, start in enumerate(starts)]

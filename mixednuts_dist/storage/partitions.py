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
    """A run of consecutive sample ids given to one task."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def file_name(self) -> str:
        """Name of its file in a stage's folder."""
        return f"part-{self.index:05d}.parquet"

    @property
    def stem(self) -> str:
        """What the names of the files of a thousand partitions begin with."""
        return f"part-{self.index // 1000:02d}"

    def __str__(self) -> str:
        return f"partition {self.index} (images {self.start}-{self.stop - 1})"


@dataclass(frozen=True)
class Sample:
    """`n_drawn` of `n_images` images, drawn at random: the same ones wherever they are drawn."""

    n_images: int
    n_drawn: int
    seed: int

    @functools.cache  # noqa: B019  a worker asks at every piece, of one sample
    def ids(self) -> Tensor:
        """The sample ids, ascending."""
        import torch  # here, because a look at a run does without

        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.n_images, generator=generator)[: self.n_drawn].sort().values

    def rows_of(self, piece: Partition) -> Tensor:
        """Which rows of a piece's images are drawn."""
        return rows_among(self.ids(), piece)


def rows_among(sample_ids: Tensor, piece: Partition) -> Tensor:
    """The rows of a piece's images whose ids are among these ascending ones."""
    first, last = sample_ids.numpy().searchsorted([piece.start, piece.stop]).tolist()
    return sample_ids[first:last] - piece.start


def partition_size_of(n_images: int, configured: int | None) -> int:
    """Return the number of images per partition: 32 by default, 16 for small sets, so that progress shows."""
    return configured or (_SMALL_SIZE if n_images <= _SMALL_SET else _SIZE)


def split_images(n_images: int, partition_size: int) -> list[Partition]:
    """Cut images 0 .. n_images - 1 into partitions of `partition_size`, the last one shorter."""
    starts = range(0, n_images, partition_size)
    return [Partition(i, start, min(start + partition_size, n_images)) for i, start in enumerate(starts)]

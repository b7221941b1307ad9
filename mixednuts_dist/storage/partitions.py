"""How a split is cut: partition i holds the sample ids `start` .. `stop - 1`; a span is a part of a partition."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SPANS = "spans"  # folder of the spans' files, below a stage's


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
class Span(Partition):
    """Some consecutive images of the partition `whole`, with a file of their own until all spans of it are merged."""

    whole: Partition

    @property
    def file_name(self) -> str:
        """Name of its file in a stage's folder."""
        return f"{SPANS}/part-{self.index:05d}-{self.start}-{self.stop}.parquet"


def whole_of(piece: Partition) -> Partition:
    """The partition that a span belongs to; a partition is its own."""
    return piece.whole if isinstance(piece, Span) else piece


def span_of(piece: Partition, start: int, stop: int) -> Partition:
    """Images `start` .. `stop - 1` of a piece; all of a partition's images are the partition itself."""
    whole = whole_of(piece)
    return whole if (start, stop) == (whole.start, whole.stop) else Span(whole.index, start, stop, whole)


def uncovered(whole: Partition, done: Iterable[Span]) -> list[Partition]:
    """What the finished spans leave of their partition, in order."""
    gaps, cursor = [], whole.start
    for span in sorted(done, key=lambda span: span.start):
        if cursor < span.start:
            gaps.append(span_of(whole, cursor, span.start))
        cursor = max(cursor, span.stop)
    return [*gaps, span_of(whole, cursor, whole.stop)] if cursor < whole.stop else gaps


def without_overlaps(spans: Iterable[Span]) -> list[Span]:
    """Spans of one partition in order; of two that share images, as two drivers can leave them, the earlier one."""
    kept: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if not kept or span.start >= kept[-1].stop:
            kept.append(span)
    return kept


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


def split_images(n_images: int, partition_size: int) -> list[Partition]:
    """Cut images 0 .. n_images - 1 into partitions of `partition_size`, the last one shorter."""
    starts = range(0, n_images, partition_size)
    return [Partition(i, start, min(start + partition_size, n_images)) for i, start in enumerate(starts)]

"""How a split is cut: partition i holds the sample ids `start` .. `stop - 1`."""

from dataclasses import dataclass


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

    def __str__(self) -> str:
        return f"partition {self.index} (images {self.start}-{self.stop - 1})"


def split_images(n_images: int, partition_size: int) -> list[Partition]:
    """Cut images 0 .. n_images - 1 into partitions of `partition_size`, the last one shorter."""
    starts = range(0, n_images, partition_size)
    return [Partition(i, start, min(start + partition_size, n_images)) for i, start in enumerate(starts)]

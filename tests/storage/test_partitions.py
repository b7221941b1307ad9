"""Partitions cover every image exactly once."""

import pytest

from mixednuts_dist.storage.partitions import split_images


@pytest.mark.parametrize(("n_images", "size", "count"), [(1, 1, 1), (10, 3, 4), (9, 3, 3), (5, 100, 1), (899, 150, 6)])
def test_every_image_is_in_exactly_one_partition(n_images: int, size: int, count: int) -> None:
    partitions = split_images(n_images, size)
    assert len(partitions) == count
    assert [i for part in partitions for i in range(part.start, part.stop)] == list(range(n_images))
    assert [part.index for part in partitions] == list(range(count))
    assert sum(map(len, partitions)) == n_images

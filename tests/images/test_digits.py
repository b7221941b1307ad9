"""The digits split: sizes, ranges, and that it is the documented one."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from mixednuts_dist.images.arrays import N_TRAIN, load_digits_split


@pytest.mark.parametrize(("split", "size"), [("train", 898), ("test", 899)])
def test_images_are_unit_range_nchw_with_integer_labels(split: Any, size: int) -> None:
    images, labels = load_digits_split(split)
    assert images.shape == (size, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.shape == (size,)
    assert labels.dtype == torch.int64
    assert torch.unique(labels).tolist() == list(range(10))


def test_the_halves_are_the_rows_in_their_order() -> None:
    digits = load_digits()
    train_images, train_labels = load_digits_split("train")
    test_images, test_labels = load_digits_split("test")
    images, labels = torch.cat([train_images, test_images]), torch.cat([train_labels, test_labels])
    assert torch.equal(images[:, 0] * 16, torch.tensor(digits.images, dtype=torch.float32))
    assert torch.equal(labels, torch.tensor(digits.target, dtype=torch.int64))
    assert len(train_labels) == N_TRAIN

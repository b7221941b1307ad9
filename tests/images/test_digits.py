"""The digits split: sizes, ranges, and that it is the documented one."""

import torch
from sklearn.datasets import load_digits

from mixednuts_dist.images.arrays import load_digits_split


def test_the_halves_are_the_rows_in_their_order() -> None:
    digits = load_digits()
    train_images, train_labels = load_digits_split("train")
    test_images, test_labels = load_digits_split("test")
    images, labels = torch.cat([train_images, test_images]), torch.cat([train_labels, test_labels])
    assert torch.equal(images[:, 0] * 16, torch.tensor(digits.images, dtype=torch.float32))
    assert torch.equal(labels, torch.tensor(digits.target, dtype=torch.int64))
    assert (len(train_labels), len(test_labels)) == (898, 899)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)

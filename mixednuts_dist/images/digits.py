"""Scikit-learn's handwritten digits: the data set that ships with the package's dependencies.

The 1,797 images of 8 x 8 pixels are the test part of the UCI "Optical Recognition of Handwritten Digits" data: about
130 from each of 13 people, and the rows, to judge by the rhythm of their labels, keep each person's together. A
cut at one row therefore separates people: all but the one writer whom it passes through are on one side only. A
shuffled split would put every hand on both sides and flatter the accuracies.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mixednuts_dist.errors import DatasetError

DigitsSplit = Literal["train", "test"]

N_TRAIN = 898  # rows 0..897 train; the remaining 899 test
_LARGEST_PIXEL = 16  # each pixel counts the inked dots of a 4 x 4 block


def load_digits_split(split: DigitsSplit) -> tuple[Tensor, Tensor]:
    """Read one half of the digits; an image's sample id is its row in what this returns.

    Args:
        split: "train" for the first 898 rows of `sklearn.datasets.load_digits`, "test" for the other 899.

    Returns:
        Images, float32 of shape (N, 1, 8, 8) in [0, 1] (multiples of 1/16), and labels, int64 of shape (N,).

    Raises:
        DatasetError: for any other split, or where scikit-learn is not installed.
    """
    if split not in get_args(DigitsSplit):
        raise DatasetError(f"digits has no split {split!r}; valid splits: {', '.join(get_args(DigitsSplit))}")
    table = np.loadtxt(_table(), delimiter=",", dtype=np.int64)  # 64 pixels, then the label
    rows = table[:N_TRAIN] if split == "train" else table[N_TRAIN:]
    images_BCHW = torch.from_numpy(rows[:, :-1]).float().reshape(-1, 1, 8, 8) / _LARGEST_PIXEL
    return images_BCHW, torch.from_numpy(rows[:, -1].copy())


def _table() -> Path:
    """What `sklearn.datasets.load_digits` reads; importing that costs every worker three seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DatasetError("digits come with scikit-learn, which is not installed. Run: pip install scikit-learn")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"

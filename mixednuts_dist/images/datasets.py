"""Images by URI: float32 (B, C, H, W) in [0, 1] with int64 labels, one slice of the split at a time.

An image's sample id is its index in the split, whatever the run asks for.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ..uris import check_dataset_uri, parse_uri
from .array_images import open_cifar, open_digits, open_npz
from .image_files import open_folder
from .imagenet import open_imagenet
from .parquet_images import open_parquet


class Dataset(Protocol):
    """An opened split; the images lie on disk or in a bucket until they are read."""

    @property
    def uri(self) -> str:
        """What it was opened as."""

    @property
    def labels(self) -> np.ndarray[Any, Any]:
        """All labels, int64 of shape (N,), without reading an image."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Images `start` .. `stop - 1`, float32 in [0, 1] of shape (B, C, H, W), and their labels."""

    def checksum(self, n: int) -> str:
        """sha256 of what the first `n` images and labels are read from; memory stays flat."""


def labels_checksum(dataset: Dataset) -> str:
    """sha256 of all labels in order: cheap, and two different trees of files seldom share it."""
    return hashlib.sha256(dataset.labels.astype(np.int64).tobytes()).hexdigest()


def open_dataset(uri: str) -> Dataset:
    """Open the dataset that `uri` names.

    Raises:
        DatasetError: for an unknown form, missing files, or files that are not images with labels.
    """
    check_dataset_uri(uri)
    parsed = parse_uri(uri)
    openers: dict[str, Callable[[], Dataset]] = {
        "digits": open_digits,
        "cifar10": lambda: open_cifar("CIFAR10", parsed.target),
        "cifar100": lambda: open_cifar("CIFAR100", parsed.target),
        "npz": lambda: open_npz(parsed.target),
        "folder": lambda: open_folder(parsed.target, parsed.option("preprocess")),
        "imagenet": lambda: open_imagenet(parsed.target, parsed.option("preprocess")),
        "parquet": lambda: open_parquet(parsed.target),
    }
    return openers[parsed.scheme]()

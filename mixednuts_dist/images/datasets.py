"""Images by URI: float32 (B, C, H, W) in [0, 1] with int64 labels, one slice of the split at a time.

An image's sample id is its index in the split, whatever the run asks for.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config.uris import DatasetSource
from ..errors import DatasetError


class Dataset(Protocol):
    """An opened split; the images lie on disk or in a bucket until they are read."""

    @property
    def uri(self) -> str:
        """The URI that it was opened by."""

    @property
    def labels(self) -> np.ndarray[Any, Any]:
        """All labels, int64 of shape (N,), without reading an image."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, float32 (C, H, W) in [0, 1], and its label; `indexed.Indexed` adds it to a class with `read`."""

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
    dataset: Dataset = DatasetSource.of(uri).open("data.uri")
    return dataset


def check_images(images_BCHW: Tensor, labels_B: Tensor, uri: str) -> None:
    """Check that a dataset has read float32 images in [0, 1] with their labels.

    Raises:
        DatasetError: with what was found.
    """
    if images_BCHW.dim() != 4 or images_BCHW.dtype != torch.float32 or labels_B.shape != images_BCHW.shape[:1]:
        raise DatasetError(
            f"{uri}: read images {tuple(images_BCHW.shape)} of {images_BCHW.dtype} and labels {tuple(labels_B.shape)}; "
            "they must be float32 (images, channels, height, width) and one label per image"
        )
    if not bool(torch.isfinite(images_BCHW).all()):
        raise DatasetError(f"{uri}: some pixels are NaN or infinite")
    if images_BCHW.numel() and not (float(images_BCHW.min()) >= 0 and float(images_BCHW.max()) <= 1):
        low, high = float(images_BCHW.min()), float(images_BCHW.max())
        raise DatasetError(f"{uri}: pixels range over [{low:.9g}, {high:.9g}]; they must lie in [0, 1]")

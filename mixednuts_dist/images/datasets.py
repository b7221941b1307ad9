"""Open datasets by URI, and read them one slice at a time: float32 (B, C, H, W) in [0, 1], with int64 labels.

The sample id of an image is its index in the split, even if a run uses only some of the images.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ..attacks.verification import check_images
from ..config.uris import DatasetSource
from ..errors import DatasetError, InvalidInputError


class Dataset(Protocol):
    """An opened split. Its images remain on disk or in a bucket until they are read.

    A `torch.utils.data.DataLoader` accepts it.
    """

    uri: str
    labels: np.ndarray[Any, Any]  # (N,) int64, known without reading an image

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one image, float32 (C, H, W) in [0, 1], and its label.

        Raises:
            IndexError: for an index after the last image.
        """
        start = range(len(self))[index]
        images, labels = self.read(start, start + 1)
        return images[0], int(labels[0])

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return images `start` .. `stop - 1`, float32 in [0, 1] of shape (B, C, H, W), and their labels."""

    def checksum(self, n: int) -> str:
        """Return the sha256 of the data of the first `n` images and labels, in constant memory."""


def labels_checksum(dataset: Dataset) -> str:
    """Return the sha256 of all labels in order, a quick way to notice that files were exchanged."""
    return hashlib.sha256(dataset.labels.astype(np.int64).tobytes()).hexdigest()


def open_dataset(uri: str) -> Dataset:
    """Open the dataset that `uri` names.

    Raises:
        DatasetError: for an unknown form, missing files, or files that are not images with labels.
    """
    dataset: Dataset = DatasetSource.of(uri).open("data.uri")
    return dataset


def check_read(images_BCHW: Tensor, labels_B: Tensor, uri: str) -> None:
    """Check that a dataset has read images in [0, 1] with their labels. Raises DatasetError with what was found."""
    try:
        check_images(images_BCHW, labels_B)
    except InvalidInputError as error:
        raise DatasetError(f"{uri}: {error}") from error

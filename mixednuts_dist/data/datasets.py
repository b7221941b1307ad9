"""Images by URI: float32 (B, C, H, W) in [0, 1] with int64 labels, one slice of the split at a time.

An image's sample id is its index in the split, whatever the run asks for.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DatasetError
from .digits import load_digits_split
from .uris import check_dataset_uri, parse_uri

CIFAR_ROOT = "data"


@dataclass(frozen=True)
class Dataset:
    """An opened split; `images` and `labels` may still lie on disk."""

    uri: str
    images: np.ndarray[Any, Any]  # (N, C, H, W), uint8 or float32
    labels: np.ndarray[Any, Any]  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Images `start` .. `stop - 1` as float32 in [0, 1], and their labels."""
        pixels = torch.from_numpy(np.ascontiguousarray(self.images[start:stop]))
        images = pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels.float()
        return images, torch.from_numpy(np.ascontiguousarray(self.labels[start:stop]))

    def checksum(self, n: int) -> str:
        """sha256 of the first `n` images and labels."""
        sha = hashlib.sha256(np.ascontiguousarray(self.labels[:n]).tobytes())
        for start in range(0, n, 1000):
            sha.update(np.ascontiguousarray(self.images[start : min(start + 1000, n)]).tobytes())
        return sha.hexdigest()


def open_dataset(uri: str) -> Dataset:
    """Open the dataset that `uri` names.

    Raises:
        DatasetError: for an unknown form, missing files, or arrays that are not images with labels.
    """
    check_dataset_uri(uri)
    parsed = parse_uri(uri)
    readers: dict[str, Callable[[str], tuple[Any, Any]]] = {
        "digits": _digits,
        "npz": _npz,
        "cifar10": lambda root: _cifar("CIFAR10", root),
        "cifar100": lambda root: _cifar("CIFAR100", root),
    }
    images, labels = readers[parsed.scheme](parsed.target)
    return _checked(uri, images, labels)


def _digits(_: str) -> tuple[Any, Any]:
    images, labels = load_digits_split("test")
    return images.numpy(), labels.numpy()


def _npz(path: str) -> tuple[Any, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        if not {"images", "labels"} <= set(arrays.files):
            raise DatasetError(f"npz:{path} holds {sorted(arrays.files)}; it needs the arrays images and labels")
        return arrays["images"], arrays["labels"]


def _cifar(name: str, root: str) -> tuple[Any, Any]:
    from torchvision import datasets

    folder = Path(root or CIFAR_ROOT)
    try:
        split = getattr(datasets, name)(folder, train=False, download=False)
    except RuntimeError as error:
        raise DatasetError(
            f"{name} is not under {folder.absolute()}; download it once with: "
            f"python -c \"import torchvision; torchvision.datasets.{name}('{folder}', download=True)\""
        ) from error
    return split.data, np.asarray(split.targets)


def _checked(uri: str, images: Any, labels: Any) -> Dataset:
    """Channels first, a known pixel type and range, one label an image."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
        raise DatasetError(f"{uri}: images {images.shape} and labels {labels.shape} are not N images with N labels")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise DatasetError(f"{uri}: pixels are {images.dtype}; store uint8, or floats in [0, 1]")
    if images.dtype != np.uint8 and not (images.min() >= 0 and images.max() <= 1):
        raise DatasetError(f"{uri}: pixels range over [{images.min():g}, {images.max():g}]; store them in [0, 1]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise DatasetError(f"{uri}: labels must be integers from 0; found {labels.dtype} from {labels.min()}")
    return Dataset(uri, images, labels.astype(np.int64))

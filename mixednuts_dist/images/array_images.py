"""Splits that are arrays: the digits, CIFAR and .npz files, the latter read slice by slice."""

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..classifiers.robustbench_package import import_quietly
from ..errors import DatasetError
from .digits import load_digits_split

CIFAR_ROOT = "data"
_CHUNK = 1000  # images looked at at a time
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class ArrayImages:
    """Images as one array, in memory or in an .npz file; channels first or last, uint8 or floats in [0, 1]."""

    uri: str
    images: "np.ndarray[Any, Any] | StoredArray"
    labels: np.ndarray[Any, Any]  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Images `start` .. `stop - 1` as float32 in [0, 1], and their labels."""
        return self._tensors(self.images[start:stop], self.labels[start:stop])

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Any images as float32 in [0, 1], and their labels."""
        return self._tensors(self.images[list(indices)], self.labels[list(indices)])

    def checksum(self, n: int) -> str:
        """sha256 of the first `n` images and labels."""
        sha = hashlib.sha256(np.ascontiguousarray(self.labels[:n]).tobytes())
        for start in range(0, n, _CHUNK):
            sha.update(np.ascontiguousarray(_channels_first(self.images[start : min(start + _CHUNK, n)])).tobytes())
        return sha.hexdigest()

    def _tensors(self, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.ascontiguousarray(_channels_first(images)))
        scaled = pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels.float()
        return scaled, torch.from_numpy(np.ascontiguousarray(labels))


def open_digits() -> ArrayImages:
    """The test half of scikit-learn's digits."""
    images, labels = load_digits_split("test")
    return _checked("digits", images.numpy(), labels.numpy())


def open_cifar(name: str, root: str) -> ArrayImages:
    """The test split of "CIFAR10" or "CIFAR100" under `root`, as torchvision keeps it.

    Raises:
        DatasetError: where it is not there, with the command that downloads it.
    """
    folder = Path(root or CIFAR_ROOT)
    datasets = import_quietly("torchvision.datasets")
    try:
        split = getattr(datasets, name)(folder, train=False, download=False)
    except RuntimeError as error:
        raise DatasetError(
            f"{name} is not under {folder.absolute()}; download it once with: "
            f"python -c \"import torchvision; torchvision.datasets.{name}('{folder}', download=True)\""
        ) from error
    return _checked(f"{name.lower()}:{folder}", split.data, np.asarray(split.targets))


def open_npz(path: str) -> ArrayImages:
    """The arrays `images` and `labels` of an .npz file.

    Raises:
        DatasetError: where they are missing or are no images with labels.
    """
    uri = f"npz:{path}"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [Path(name).stem for name in archive.namelist()]
        if not {"images", "labels"} <= set(names):
            raise DatasetError(f"{uri} holds {sorted(names)}; it needs the arrays images and labels")
        images, labels = (StoredArray.of(Path(path), f"{name}.npy") for name in ("images", "labels"))
        return _checked(uri, images, labels[:])
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DatasetError(f"{uri} is damaged or no .npz file: {error}") from error


@dataclass(frozen=True)
class StoredArray:
    """One array of an .npz file, sliced along its first axis without reading the rest into memory.

    A compressed file (np.savez_compressed) is unpacked from its beginning up to the slice at every read.
    """

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = field(repr=False)  # of the first element in the member

    @classmethod
    def of(cls, path: Path, member: str) -> "StoredArray":
        """Read the array's header.

        Raises:
            ValueError: for Python objects, an unknown version, or columns first (Fortran order).
        """
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADER_READERS:
                raise ValueError(f"{member} has format version {version}")
            shape, fortran_order, dtype = _HEADER_READERS[version](file)
            if fortran_order or dtype.hasobject:
                raise ValueError(f"{member} is stored columns first or as objects; save np.ascontiguousarray(images)")
            return cls(path, member, shape, dtype, file.tell())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice | list[int]) -> np.ndarray[Any, Any]:
        indices = list(range(*rows.indices(self.shape[0]))) if isinstance(rows, slice) else rows
        places = {index: place for place, index in enumerate(indices)}
        found = np.empty((len(indices), *self.shape[1:]), self.dtype)
        size = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
            for index in sorted(places):  # forwards only: going back means unpacking from the beginning
                file.seek(self.offset + index * size)
                found[places[index]] = np.frombuffer(file.read(size), self.dtype).reshape(self.shape[1:])
        return found


def _channels_first(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(B, C, H, W) of grey images (B, H, W) and of images with their channels last."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return images.transpose(0, 3, 1, 2)
    return images


def _checked(uri: str, images: "np.ndarray[Any, Any] | StoredArray", labels: np.ndarray[Any, Any]) -> ArrayImages:
    """A known shape, pixel type and range, one label an image."""
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or not len(labels):
        raise DatasetError(f"{uri}: images {images.shape} and labels {labels.shape} are not N images with N labels")
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise DatasetError(f"{uri}: pixels are {images.dtype}; store uint8, or floats in [0, 1]")
    if images.dtype != np.uint8:
        extremes = list(_extremes(images))
        low, high = np.min(extremes), np.max(extremes)
        if not (low >= 0 and high <= 1):
            raise DatasetError(f"{uri}: pixels range over [{low:g}, {high:g}]; store them in [0, 1]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise DatasetError(f"{uri}: labels must be integers from 0; found {labels.dtype} from {labels.min()}")
    return ArrayImages(uri, images, labels.astype(np.int64))


def _extremes(images: "np.ndarray[Any, Any] | StoredArray") -> Iterator[tuple[float, float]]:
    for start in range(0, images.shape[0], _CHUNK):
        part = images[start : start + _CHUNK]
        yield float(part.min()), float(part.max())

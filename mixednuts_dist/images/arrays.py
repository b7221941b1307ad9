"""Datasets that are arrays: `digits`, `cifar10`, `cifar100` and `npz:FILE`."""

import hashlib
import logging
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..classifiers.checkpoints import import_quietly
from ..config.register import DATASETS
from ..config.uris import DatasetSource, Missing
from ..errors import DatasetError
from .datasets import Dataset, check_read

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

CIFAR_ROOT = "data"
N_TRAIN = 898  # rows 0 to 897 are the training half of the digits, and the other 899 are the test half
_CHUNK = 1000  # images that are checked or hashed at a time
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LENGTHS_AT = 26  # offset in a zip member's header of the lengths of its last two fields, the name and the extra field


@dataclass
class ArrayImages(Dataset):
    """Images in one array, in memory or mapped from a file, of shape (N, C, H, W), (N, H, W, C) or (N, H, W).

    Raises:
        DatasetError: if the arrays are not such images with one label per image.
    """

    uri: str
    images: Array  # uint8, or floats in [0, 1]
    labels: Array  # (N,) integers
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_arrays(self.uri, self.images, self.labels)
        self.labels = self.labels.astype(np.int64)
        if self.images.ndim == 3:
            self.images = self.images[:, None]
        elif self.images.shape[-1] in (1, 3) and self.images.shape[1] not in (1, 3):
            self.images = self.images.transpose(0, 3, 1, 2)
        if self.images.dtype != np.uint8:
            for start in range(0, len(self), _CHUNK):
                check_read(*self.read(start, start + _CHUNK), self.uri)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return images `start` .. `stop - 1` as float32 in [0, 1], and their labels."""
        native = self.images.dtype.newbyteorder("=")  # torch knows no other byte order
        pixels = torch.from_numpy(np.array(self.images[start:stop], native, order="C"))
        scaled = pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels.float()
        return scaled, torch.from_numpy(self.labels[start:stop].copy())

    def checksum(self, n: int) -> str:
        """Return the sha256 of the first `n` images and labels."""
        sha = hashlib.sha256(np.ascontiguousarray(self.labels[:n]).tobytes())
        for start in range(0, n, _CHUNK):
            sha.update(np.ascontiguousarray(self.images[start : min(start + _CHUNK, n)]).tobytes())
        return sha.hexdigest()


@DATASETS("digits", describes="the test half of scikit-learn's digits", order=1, forms=("digits",), target="nothing",
          image_shape=(1, 8, 8))  # fmt: skip
def open_digits(_: DatasetSource) -> ArrayImages:
    """Open the 899 images on which the demo classifiers were not trained."""
    images, labels = load_digits_split("test")
    return ArrayImages("digits", images.numpy(), labels.numpy())


def load_digits_split(split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Return one half of the digits: images (N, 1, 8, 8), float32 in [0, 1], and labels (N,), int64.

    The rows of each of the 13 writers seem to be together, so a cut at one row puts all writers except one on one side.
    With a shuffled split, the accuracies would be too high.
    """
    package = find_spec("sklearn")  # its table is read as a file, because importing scikit-learn takes three seconds
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)  # 64 pixels, then the label
    rows = table[:N_TRAIN] if split == "train" else table[N_TRAIN:]
    images_BCHW = torch.from_numpy(rows[:, :-1]).float().reshape(-1, 1, 8, 8) / 16  # a pixel counts 4 x 4 dots
    return images_BCHW, torch.from_numpy(rows[:, -1].copy())


def missing_cifar(uri: DatasetSource) -> Iterator[Missing]:
    """List the missing files of `cifar10:` and `cifar100:` URIs."""
    name, folder = uri.scheme.upper(), uri.target or CIFAR_ROOT
    cifar = getattr(import_quietly("torchvision.datasets"), name)
    path = Path(folder, cifar.base_folder, cifar.test_list[0][0])

    def get() -> Path:
        cifar(folder, download=True)  # it checks the MD5
        return path

    if not path.is_file():
        command = f"python -c \"import torchvision; torchvision.datasets.{name}('{folder}', download=True)\""
        yield Missing(f"the images of {name}", str(path.absolute()), command, get=get)


@DATASETS("cifar10", describes="CIFAR-10's test images, in torchvision's layout", order=2, forms=("cifar10[:ROOT]",),
          image_shape=(3, 32, 32), missing="missing_cifar")  # fmt: skip
@DATASETS("cifar100", describes="CIFAR-100's test images, in torchvision's layout", order=3,
          forms=("cifar100[:ROOT]",), image_shape=(3, 32, 32), missing="missing_cifar")  # fmt: skip
def open_cifar(uri: DatasetSource) -> ArrayImages:
    """Open the test split in ROOT.

    Raises:
        DatasetError: if it is missing, with the command that downloads it, or if its MD5 is not torchvision's.
    """
    for lacking in missing_cifar(uri):
        raise DatasetError(f"{lacking.what} are missing: {lacking.path}. Download them once: {lacking.command}")
    folder = Path(uri.target or CIFAR_ROOT)
    split = getattr(import_quietly("torchvision.datasets"), uri.scheme.upper())(folder, train=False, download=False)
    return ArrayImages(f"{uri.scheme}:{folder}", split.data, np.asarray(split.targets), tuple(split.classes))


@DATASETS(
    "npz", describes="the arrays `images` and `labels` of a NumPy file", order=6, forms=("npz:FILE",), target="file"
)
def open_npz(uri: DatasetSource) -> ArrayImages:
    """Open the arrays `images` and `labels` of an .npz file after checking every byte against its CRC.

    Raises:
        DatasetError: if an array is missing or does not hold images or labels.
        Any error of zipfile, its decompressors or numpy: for a damaged file.
    """
    path, name = Path(uri.target), f"npz:{uri.target}"
    with zipfile.ZipFile(path) as archive:
        members = {Path(member.filename).stem: member for member in archive.infolist()}
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is damaged")
    if not {"images", "labels"} <= set(members):
        raise DatasetError(f"{name} holds {sorted(members)[:10]}; it needs the arrays images and labels")
    return ArrayImages(name, _array(path, members["images"]), _array(path, members["labels"]))


def _array(path: Path, member: zipfile.ZipInfo) -> Array:
    """Map an array of an .npz file, so that only images that are read need memory; load a compressed array."""
    if member.compress_type != zipfile.ZIP_STORED:
        with np.load(path, allow_pickle=False) as held:
            return np.asarray(held[Path(member.filename).stem])
    with path.open("rb") as file:
        file.seek(member.header_offset + _LENGTHS_AT)
        begin = file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        shape, fortran_order, dtype = _HEADER_READERS[np.lib.format.read_magic(file)](file)
        size = file.tell() - begin + math.prod(shape) * dtype.itemsize
        if dtype.hasobject or size != member.file_size:
            raise ValueError(f"{member.filename} declares {shape} of {dtype}, and holds objects or another size")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")


def _check_arrays(uri: str, images: Array, labels: Array) -> None:
    """Check the shape and type of the pixels, and that each image has a label."""
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or not len(labels) or 0 in images.shape:
        raise DatasetError(f"{uri}: images {images.shape} and labels {labels.shape} are not N images with N labels")
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or labels.astype(np.int64).min() < 0:  # the largest uint64 is -1
        found = f"{labels.dtype} from {labels.min()} to {labels.max()}" if whole else str(labels.dtype)
        raise DatasetError(f"{uri}: labels must be integers, 0 or more; found {found}")
    if images.dtype.newbyteorder("=") not in (np.uint8, np.float16, np.float32, np.float64):
        raise DatasetError(f"{uri}: pixels are {images.dtype}; store uint8, or floats in [0, 1]")
    if images.dtype == np.uint8 and images[:_CHUNK].max() <= 1:
        logger.warning("%s: pixels are uint8 and all 0 or 1, which counts as black; if 1 is white, store floats", uri)

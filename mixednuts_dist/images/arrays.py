"""Splits that are arrays: `digits`, `cifar10`, `cifar100` and `npz:FILE`, the last read slice by slice.

Torch is imported where tensors are made, so that missing files are found without it.
"""

import hashlib
import logging
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..config.register import DATASETS
from ..config.uris import DatasetSource, Missing
from ..errors import DatasetError
from .datasets import Dataset

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CIFAR_ROOT = "data"
N_TRAIN = 898  # rows 0..897 of the digits train; the remaining 899 test
LARGEST_LABEL = 2**31 - 1  # larger values are hashes, or -1 that was read as unsigned
_LARGEST_PIXEL = 16  # each pixel of the digits counts the inked dots of a 4 x 4 block
_CHUNK = 1000  # images looked at at a time
_FLOATS = (np.float16, np.float32, np.float64)
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Exceptions of zipfile, its decompressors, and numpy's header reader for damaged bytes.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError, SyntaxError, EOFError),
    *(OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError, NotImplementedError, RuntimeError),
)
_CIFAR_FILES = {
    "CIFAR10": ("cifar-10-batches-py/test_batch", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
    "CIFAR100": ("cifar-100-python/test", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"),
}


@dataclass(frozen=True)
class ArrayImages(Dataset):
    """Images in one array, in memory or in an .npz file: channels first or last, uint8 or floats in [0, 1].

    Raises:
        DatasetError: if the arrays are not such images with one label per image.
    """

    uri: str
    images: "np.ndarray[Any, Any] | StoredArray"
    labels: np.ndarray[Any, Any]  # (N,) integers; int64 once it is made
    class_names: tuple[str, ...] = ()  # where they are known

    def __post_init__(self) -> None:
        _check_arrays(self.uri, self.images, self.labels)
        object.__setattr__(self, "labels", self.labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> "tuple[Tensor, Tensor]":
        """Return images `start` .. `stop - 1` as float32 in [0, 1], and their labels."""
        return self._tensors(self.images[start:stop], self.labels[start:stop])

    def take(self, indices: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Return any images as float32 in [0, 1], and their labels."""
        return self._tensors(self.images[list(indices)], self.labels[list(indices)])

    def checksum(self, n: int) -> str:
        """Return the sha256 of the first `n` images and labels."""
        sha = hashlib.sha256(np.ascontiguousarray(self.labels[:n]).tobytes())
        for start in range(0, n, _CHUNK):
            sha.update(np.ascontiguousarray(_channels_first(self.images[start : min(start + _CHUNK, n)])).tobytes())
        return sha.hexdigest()

    def _tensors(self, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> "tuple[Tensor, Tensor]":
        import torch

        ours = images.astype(images.dtype.newbyteorder("="), copy=False)  # torch knows no other byte order
        pixels = torch.from_numpy(np.ascontiguousarray(_channels_first(ours)))
        scaled = pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels.float()
        return scaled, torch.from_numpy(np.ascontiguousarray(labels))


@DATASETS("digits", describes="the test half of scikit-learn's digits", order=1, forms=("digits",), target="nothing",
          image_shape=(1, 8, 8))  # fmt: skip
def open_digits(_: DatasetSource) -> ArrayImages:
    """Open the 899 images that are not training images of the demo classifiers."""
    images, labels = load_digits_split("test")
    return ArrayImages("digits", images.numpy(), labels.numpy())


def load_digits_split(split: Literal["train", "test"]) -> "tuple[Tensor, Tensor]":
    """Read one half of the digits. The sample id of an image is its row in the half.

    The 1,797 images of 8 x 8 pixels are the test part of the UCI "Optical Recognition of Handwritten Digits" data,
    about 130 from each of 13 people. The labels suggest that the rows of each person are together, so a cut at one row
    separates people: the images of all writers except one are on one side. A shuffled split would put every writer on
    both sides, and the accuracies would be too high.

    Args:
        split: "train" for the first 898 rows of `sklearn.datasets.load_digits`, "test" for the other 899.

    Returns:
        Images, float32 of shape (N, 1, 8, 8) in [0, 1] (multiples of 1/16), and labels, int64 of shape (N,).
    """
    import torch

    package = find_spec("sklearn")  # its table is read as a file, because importing scikit-learn takes three seconds
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)  # 64 pixels, then the label
    rows = table[:N_TRAIN] if split == "train" else table[N_TRAIN:]
    images_BCHW = torch.from_numpy(rows[:, :-1]).float().reshape(-1, 1, 8, 8) / _LARGEST_PIXEL
    return images_BCHW, torch.from_numpy(rows[:, -1].copy())


def missing_cifar(uri: DatasetSource) -> Iterator[Missing]:
    """List the missing files of `cifar10:` and `cifar100:` URIs."""
    name, folder = uri.scheme.upper(), Path(uri.target or CIFAR_ROOT)
    file, url = _CIFAR_FILES[name]
    if not (folder / file).is_file():
        yield Missing(f"the images of {name}", str((folder / file).absolute()), _cifar_command(name, folder), url)


def _cifar_command(name: str, folder: Path) -> str:
    return f"python -c \"import torchvision; torchvision.datasets.{name}('{folder}', download=True)\""


@DATASETS("cifar10", describes="CIFAR-10's test images, as torchvision keeps them", order=2, forms=("cifar10[:ROOT]",),
          image_shape=(3, 32, 32), missing="missing_cifar")  # fmt: skip
@DATASETS("cifar100", describes="CIFAR-100's test images, as torchvision keeps them", order=3,
          forms=("cifar100[:ROOT]",), image_shape=(3, 32, 32), missing="missing_cifar")  # fmt: skip
def open_cifar(uri: DatasetSource) -> ArrayImages:
    """Open the test split in ROOT.

    Raises:
        DatasetError: if it is missing, with the command that downloads it.
    """
    from ..classifiers.checkpoints import import_quietly

    name, folder = uri.scheme.upper(), Path(uri.target or CIFAR_ROOT)
    datasets = import_quietly("torchvision.datasets")
    try:
        split = getattr(datasets, name)(folder, train=False, download=False)
    except RuntimeError as error:
        raise DatasetError(
            f"{name} is not under {folder.absolute()}; download it once with: {_cifar_command(name, folder)}"
        ) from error
    return ArrayImages(f"{name.lower()}:{folder}", split.data, np.asarray(split.targets), tuple(split.classes))


@DATASETS("npz", describes="the arrays images and labels of a numpy file", order=6, forms=("npz:FILE",), target="file")
def open_npz(uri: DatasetSource) -> ArrayImages:
    """Open the arrays `images` and `labels` of an .npz file after checking every byte against its CRC.

    Raises:
        DatasetError: if the file is damaged, or an array is missing or does not hold images or labels.
    """
    path, name = Path(uri.target), f"npz:{uri.target}"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [Path(member).stem for member in archive.namelist()]
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is not what was written")
        if not {"images", "labels"} <= set(names):
            raise DatasetError(f"{name} holds {sorted(names)[:10]}; it needs the arrays images and labels")
        images, labels = (StoredArray.of(path, f"{array}.npy") for array in ("images", "labels"))
        return ArrayImages(name, images, labels[:])
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DatasetError(f"{name} is damaged or no .npz file of arrays: {reason}") from error


@dataclass(frozen=True)
class StoredArray:
    """One array of an .npz file. A slice along its first axis reads only that slice into memory.

    A compressed file (np.savez_compressed) is unpacked from its beginning up to the slice at every read.
    """

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = field(repr=False)  # first element in the member

    @classmethod
    def of(cls, path: Path, member: str) -> "StoredArray":
        """Read the header of the array.

        Raises:
            ValueError: for Python objects, an unknown version, columns first (Fortran order), or fewer bytes than the
                shape requires.
        """
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADER_READERS:
                raise ValueError(f"{member} has format version {version}")
            shape, fortran_order, dtype = _HEADER_READERS[version](file)
            if fortran_order or dtype.hasobject:
                raise ValueError(f"{member} is stored columns first or as objects; save np.ascontiguousarray(images)")
            held, said = archive.getinfo(member).file_size - file.tell(), math.prod(shape) * dtype.itemsize
            if held != said:
                raise ValueError(f"{member} declares {shape} of {dtype}, {said} bytes, and holds {held}")
            return cls(path, member, shape, dtype, file.tell())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice | list[int]) -> np.ndarray[Any, Any]:
        """Return these rows in the order of the indices, which may repeat."""
        indices = list(range(*rows.indices(self.shape[0]))) if isinstance(rows, slice) else rows
        wanted = sorted(set(indices))
        read = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
            for place, index in enumerate(wanted):  # forwards only: going back means unpacking from the beginning
                file.seek(self.offset + index * size)
                read[place] = np.frombuffer(file.read(size), self.dtype).reshape(self.shape[1:])
        return read if indices == wanted else read[np.searchsorted(wanted, indices)]


def _channels_first(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return images as (B, C, H, W), from that shape, (B, H, W) or (B, H, W, C)."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return images.transpose(0, 3, 1, 2)
    return images


def _check_arrays(uri: str, images: "np.ndarray[Any, Any] | StoredArray", labels: np.ndarray[Any, Any]) -> None:
    """Check the shape, type and range of the pixels, and that each image has a label."""
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or not len(labels) or 0 in images.shape:
        raise DatasetError(f"{uri}: images {images.shape} and labels {labels.shape} are not N images with N labels")
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or not 0 <= int(labels.min()) <= int(labels.max()) <= LARGEST_LABEL:
        found = f"{labels.dtype} from {labels.min()} to {labels.max()}" if whole else str(labels.dtype)
        raise DatasetError(f"{uri}: labels must be integers from 0 to {LARGEST_LABEL}; found {found}")
    if images.ndim == 4 and images.shape[-1] == 4 and images.shape[1] > 4:
        logger.warning(
            "%s: images %s are taken as %d channels of %d x 4 pixels; if they are RGBA, store images[..., :3]",
            uri, images.shape, images.shape[1], images.shape[2],
        )  # fmt: skip
    if images.dtype == np.uint8:
        if images[:_CHUNK].max() <= 1:
            logger.warning(
                "%s: pixels are uint8 and all 0 or 1, which counts as black (uint8 is divided by 255); if 1 is "
                "white, store floats", uri,
            )  # fmt: skip
        return
    if images.dtype.newbyteorder("=") not in _FLOATS:
        raise DatasetError(f"{uri}: pixels are {images.dtype}; store uint8, or floats in [0, 1]")
    for start in range(0, images.shape[0], _CHUNK):
        part = images[start : start + _CHUNK]
        low, high = float(part.min()), float(part.max())
        if np.isnan(low):
            raise DatasetError(f"{uri}: images {start}-{start + len(part) - 1} hold pixels that are NaN")
        if not (low >= 0 and high <= 1):
            raise DatasetError(f"{uri}: pixels range over [{low:.12g}, {high:.12g}]; store them in [0, 1]")

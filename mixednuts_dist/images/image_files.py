"""Datasets of image files, decoded and preprocessed one slice at a time: `folder:ROOT` and `imagenet:ROOT`."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..classifiers.checkpoints import import_quietly
from ..classifiers.robustbench_zoo import robustbench_file
from ..config.register import DATASETS
from ..config.uris import PREPROCESS, DatasetSource, Missing
from ..errors import DatasetError
from .datasets import Dataset

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_PREPROCESS = "Res256Crop224"


@dataclass(frozen=True)
class ImageFiles(Dataset):
    """Image files in a folder. `names` are the paths of the files in the folder, in the order of the sample ids."""

    uri: str
    root: Path
    names: tuple[str, ...]
    labels: np.ndarray[Any, Any]  # (N,) int64
    preprocess: str | None
    class_names: tuple[str, ...]  # class 0, 1, ...

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return images `start` .. `stop - 1` as float32 in [0, 1], and their labels.

        Raises:
            DatasetError: for a file that is missing or is not an image, or for images of different sizes.
        """
        prepare, names = preprocessing(self.preprocess), self.names[start:stop]
        images = [self._decoded(name, prepare) for name in names]
        for name, image in zip(names, images, strict=True):
            if image.shape != images[0].shape:
                raise DatasetError(
                    f"{self.uri}: {names[0]} is {tuple(images[0].shape)} and {name} {tuple(image.shape)} "
                    "(channels, height, width); bring them to one size: ?preprocess=Res256Crop224"
                )
        pixels = torch.stack(images) if images else torch.empty(0, 3, 1, 1)
        return pixels.float().div(255), torch.from_numpy(self.labels[start:stop].copy())

    def checksum(self, n: int) -> str:
        """Return the sha256 of the preprocessing, and of the labels, names and bytes of the first `n` files."""
        sha = hashlib.sha256(f"{self.preprocess}".encode() + self.labels[:n].tobytes())
        for name in self.names[:n]:
            sha.update(name.encode())
            with self._opened(name) as file:
                hashlib.file_digest(file, lambda: sha)
        return sha.hexdigest()

    def _opened(self, name: str) -> BufferedReader:
        try:
            return (self.root / name).open("rb")
        except FileNotFoundError as error:
            raise DatasetError(f"{self.uri}: there is no file {self.root / name}") from error

    def _decoded(self, name: str, prepare: Callable[[Image.Image], Tensor]) -> Tensor:
        try:
            with self._opened(name) as file, Image.open(file) as image:
                return prepare(image.convert("RGB"))
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{self.uri}: {self.root / name} is damaged or no image: {error}") from error


@DATASETS("folder", describes="image files, with one subfolder per class", order=5,
          forms=("folder:ROOT[?preprocess=Res256Crop224]",), target="folder",
          options={"preprocess": "preprocess"})  # fmt: skip
def open_folder(uri: DatasetSource) -> ImageFiles:
    """Open a folder with one subfolder per class. Subfolders (classes 0, 1, ...) and files are sorted by name."""
    root = Path(uri.target)
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = [sorted(each for each in (root / name).iterdir() if each.suffix.lower() in EXTENSIONS) for name in classes]
    if not any(files):
        raise DatasetError(
            f"folder:{root} holds no images ({', '.join(EXTENSIONS)}): it needs one subfolder per class; it has the "
            f"subfolders: {', '.join(classes[:10]) or 'none'}"
        )
    names = tuple(f"{each.parent.name}/{each.name}" for one in files for each in one)
    labels = np.repeat(np.arange(len(classes)), [len(one) for one in files])
    return ImageFiles(f"folder:{uri.target}", root, names, labels, uri.option("preprocess"), tuple(classes))


def preprocessing(name: str | None) -> Callable[[Image.Image], Tensor]:
    """Return RobustBench's preprocessing of that name, from a PIL image to uint8 (3, H, W).

    A name without a crop, such as "Res224", resizes the image to a square.
    """
    transforms = import_quietly("torchvision.transforms")
    match = PREPROCESS.fullmatch(name or "")
    cubic, resize, crop = match.group("cubic", "resize", "crop") if match else (None, None, None)
    steps = []
    if resize:
        mode = transforms.InterpolationMode("bicubic" if cubic else "bilinear")
        steps.append(transforms.Resize(int(resize) if crop else [int(resize)] * 2, interpolation=mode))
    if crop:
        steps.append(transforms.CenterCrop(int(crop)))
    composed: Callable[[Image.Image], Tensor] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


@cache
def evaluation_names() -> tuple[str, ...]:
    """Return the 5000 names of RobustBench's list, such as "n09468604/ILSVRC2012_val_00015253.JPEG"."""
    return tuple(robustbench_file("helper_files/imagenet_test_image_ids.txt").read_text().split())


def class_labels() -> dict[str, int]:
    """Return a dict from WordNet id to label."""
    labels: dict[str, int] = json.loads(robustbench_file("helper_files/imagenet_class_to_id_map.json").read_text())
    return labels


def missing_imagenet(uri: DatasetSource) -> Iterator[Missing]:
    """List the missing files of `imagenet:` URIs: nothing if any image exists, because a run can use some of them."""
    folder, present = _present(uri)
    if not present:
        yield Missing(
            f"RobustBench's {len(evaluation_names())} ImageNet validation images",
            str((folder / evaluation_names()[0]).absolute()),
            "copy ILSVRC2012's validation images there, one subfolder per class (image-net.org, with an account)",
        )


@DATASETS("imagenet", describes="RobustBench's 5000 fixed ImageNet validation images", order=4,
          forms=("imagenet:ROOT[?preprocess=BicubicRes256Crop224]",), target="folder", preprocess="Res256Crop224",
          options={"preprocess": "preprocess", "order": "classes"}, missing="missing_imagenet")  # fmt: skip
def open_imagenet(uri: DatasetSource) -> ImageFiles:
    """Open those of RobustBench's 5000 images that are in ROOT, in RobustBench's order and with its labels.

    ROOT is the validation folder with one subfolder per class (n01440764, ...), or a folder that contains it as `val`.
    Labels are the positions of the 1000 classes in WordNet order. If some images or classes are missing, the others
    keep their labels and order, and a warning counts the images that exist.

    Raises:
        DatasetError: if no image exists.
    """
    for lacking in missing_imagenet(uri):
        raise DatasetError(f"{uri}: none of {lacking.what} exists, such as {lacking.path}: {lacking.command}")
    folder, names = _present(uri)
    if len(names) < len(evaluation_names()):
        logger.warning("imagenet:%s: %d of the %d images exist", uri.target, len(names), len(evaluation_names()))
    label_of = class_labels()
    labels = [label_of[name.partition("/")[0]] for name in names]
    if uri.option("order"):
        order = sorted(range(len(names)), key=lambda i: labels[:i].count(labels[i]))  # by the turn within the class
        names, labels = [names[index] for index in order], [labels[index] for index in order]
    chosen = uri.option("preprocess") or IMAGENET_PREPROCESS
    called = import_quietly("torchvision.models").ResNet18_Weights.DEFAULT.meta["categories"]  # in the labels' order
    return ImageFiles(f"imagenet:{uri.target}", folder, tuple(names), np.array(labels, np.int64), chosen, tuple(called))


def _present(uri: DatasetSource) -> tuple[Path, list[str]]:
    """Return the validation folder and those of RobustBench's names that exist in it."""
    folder = Path(uri.target) / "val" if (Path(uri.target) / "val").is_dir() else Path(uri.target)
    return folder, [name for name in evaluation_names() if (folder / name).is_file()]

"""Splits that are image files, decoded and preprocessed one slice at a time: `folder:ROOT` and `imagenet:ROOT`.

Torch is imported where tensors are made, so that missing files are found without it.
"""

import hashlib
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..classifiers.robustbench_zoo import robustbench_file
from ..config.register import DATASETS
from ..config.uris import PREPROCESS, DatasetSource, Missing
from ..errors import DatasetError
from .datasets import Dataset

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_PREPROCESS = "Res256Crop224"


@dataclass(frozen=True)
class ImageFiles(Dataset):
    """Image files in a folder. `names` are their paths in it, in a fixed order, and the names of the samples."""

    uri: str
    root: Path
    names: tuple[str, ...]
    labels: np.ndarray[Any, Any]  # (N,) int64
    preprocess: str | None
    name_classes: "Callable[[], Sequence[str]]" = tuple  # called only by the report

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes 0, 1, ..., if they are known."""
        return tuple(self.name_classes())

    def __len__(self) -> int:
        return len(self.names)

    def read(self, start: int, stop: int) -> "tuple[Tensor, Tensor]":
        """Return images `start` .. `stop - 1` as float32 in [0, 1], and their labels. Raises as `take`."""
        return self.take(range(start, min(stop, len(self))))

    def take(self, indices: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Return any images as float32 in [0, 1], and their labels.

        Raises:
            DatasetError: for a file that is missing or no image, or images of different sizes.
        """
        import torch

        prepare = preprocessing(self.preprocess)
        images = [self._decoded(self.names[i], prepare) for i in indices]
        for i, image in zip(indices, images, strict=True):
            if image.shape != images[0].shape:
                first = self.names[indices[0]]
                raise DatasetError(
                    f"{self.uri}: {first} is {tuple(images[0].shape)} and {self.names[i]} {tuple(image.shape)} "
                    "(channels, height, width); bring them to one size: ?preprocess=Res256Crop224"
                )
        pixels = torch.stack(images) if images else torch.empty(0, 3, 1, 1)
        return pixels.float().div(255), torch.from_numpy(self.labels[list(indices)])

    def checksum(self, n: int) -> str:
        """Return the sha256 of the preprocessing, and of the labels, names and bytes of the first `n` files."""
        sha = hashlib.sha256(f"{self.preprocess}".encode() + self.labels[:n].tobytes())
        for name in self.names[:n]:
            sha.update(name.encode())
            try:
                with (self.root / name).open("rb") as file:
                    hashlib.file_digest(file, lambda: sha)
            except FileNotFoundError as error:
                raise DatasetError(f"{self.uri}: there is no file {self.root / name}") from error
        return sha.hexdigest()

    def _decoded(self, name: str, prepare: "Callable[[Any], Tensor]") -> "Tensor":
        """Return one image, uint8 of shape (3, H, W)."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(self.root / name) as image:
                return prepare(image.convert("RGB"))
        except FileNotFoundError as error:
            raise DatasetError(f"{self.uri}: there is no file {self.root / name}") from error
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise DatasetError(f"{self.uri}: {self.root / name} is damaged or no image: {error}") from error


@DATASETS("folder", describes="image files in one sub-folder a class", order=5,
          forms=("folder:ROOT[?preprocess=Res256Crop224]",), target="folder",
          options={"preprocess": ("preprocess", "Res256Crop224, Res224, Crop288, with any sizes")})  # fmt: skip
def open_folder(uri: DatasetSource) -> ImageFiles:
    """Open a folder with one sub-folder per class. Sub-folders (classes 0, 1, ...) and files are sorted by name.

    Raises:
        DatasetError: if no subfolder has an image.
    """
    root = uri.target
    folder = Path(root)
    classes = class_folders(folder)
    named = [
        (f"{name}/{path.name}", label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in EXTENSIONS
    ]
    if not named:
        raise DatasetError(
            f"folder:{root} holds no images: it needs one sub-folder a class with {', '.join(EXTENSIONS)} files; "
            f"it has the sub-folders: {', '.join(classes[:10]) or 'none'}"
        )
    return image_files(f"folder:{root}", folder, named, uri.option("preprocess"), partial(tuple, classes))


def image_files(
    uri: str,
    root: Path,
    named: Sequence[tuple[str, int]],
    preprocess: str | None,
    name_classes: "Callable[[], Sequence[str]]" = tuple,
) -> ImageFiles:
    """The split of these (path below the root, label) pairs."""
    labels = np.fromiter((label for _, label in named), np.int64, len(named))
    return ImageFiles(uri, root, tuple(name for name, _ in named), labels, preprocess, name_classes)


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the sub-folders, which are the classes."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def preprocessing(name: str | None) -> "Callable[[Any], Tensor]":
    """Return RobustBench's preprocessing of that name, from a PIL image to uint8 (3, H, W). "Res224" makes a square."""
    from ..classifiers.checkpoints import import_quietly

    transforms = import_quietly("torchvision.transforms")
    match = PREPROCESS.fullmatch(name or "")
    steps = []
    if match and match["resize"]:
        mode = transforms.InterpolationMode("bicubic" if match["cubic"] else "bilinear")
        side = int(match["resize"])
        steps.append(transforms.Resize(side if match["crop"] else [side, side], interpolation=mode))
    if match and match["crop"]:
        steps.append(transforms.CenterCrop(int(match["crop"])))
    composed: Callable[[Any], Tensor] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


@cache
def evaluation_names() -> tuple[str, ...]:
    """Return the 5000 names of RobustBench's list, such as "n09468604/ILSVRC2012_val_00015253.JPEG"."""
    return tuple(robustbench_file("helper_files/imagenet_test_image_ids.txt").read_text().split())


@cache
def class_labels() -> dict[str, int]:
    """Return WordNet id -> label."""
    labels: dict[str, int] = json.loads(robustbench_file("helper_files/imagenet_class_to_id_map.json").read_text())
    return labels


def missing_imagenet(uri: DatasetSource) -> Iterator[Missing]:
    """List the missing files of `imagenet:` URIs."""
    folder = _validation_folder(uri)
    # Some of them are enough: a run uses the images that exist, and a warning counts the missing ones.
    if not any((folder / name).is_file() for name in evaluation_names()):
        yield Missing(
            f"RobustBench's {len(evaluation_names())} ImageNet validation images",
            str((folder / evaluation_names()[0]).absolute()),
            "copy ILSVRC2012's validation images there, one sub-folder a class (image-net.org, with an account)",
        )


@DATASETS("imagenet", describes="RobustBench's 5000 fixed ImageNet validation images", order=4,
          forms=("imagenet:ROOT[?preprocess=BicubicRes256Crop224]",), target="folder", preprocess="Res256Crop224",
          options={"preprocess": ("preprocess", "Res256Crop224 by default"),
                   "order": ("classes", "the first image of each class, then the second of each, and so on")},
          missing="missing_imagenet")  # fmt: skip
def open_imagenet(uri: DatasetSource) -> ImageFiles:
    """Open the images of RobustBench's 5000 that are in ROOT, in its order and with its labels.

    ROOT is the validation folder with one sub-folder a class (n01440764, ...), or the folder above it with a `val`.
    Labels are the positions of the 1000 classes in WordNet order, as in RobustBench's loader, which takes them from
    the subfolders. If some images or classes are missing, the others keep labels and order.

    Raises:
        DatasetError: if no image exists.
    """
    root, folder = uri.target, _validation_folder(uri)
    present = [name for name in evaluation_names() if (folder / name).is_file()]
    if not present:
        raise DatasetError(
            f"imagenet:{root}: none of RobustBench's {len(evaluation_names())} images is under {folder.absolute()}; "
            f"the first should be {folder / evaluation_names()[0]} (the validation images in one sub-folder a class)"
        )
    if len(present) < len(evaluation_names()):
        logger.warning("imagenet:%s: %d of the %d images exist", root, len(present), len(evaluation_names()))
    named = [(name, class_labels()[name.partition("/")[0]]) for name in present]
    if uri.option("order"):
        turns = defaultdict[int, Iterator[int]](itertools.count)  # per class
        named.sort(key=lambda image: next(turns[image[1]]))
    chosen = uri.option("preprocess") or IMAGENET_PREPROCESS
    return image_files(f"imagenet:{root}", folder, named, chosen, imagenet_class_names)


def imagenet_class_names() -> Sequence[str]:
    """Return the 1000 class names of torchvision's weights in the order of the labels."""
    from ..classifiers.checkpoints import import_quietly

    names: Sequence[str] = import_quietly("torchvision.models").ResNet18_Weights.DEFAULT.meta["categories"]
    return names


def _validation_folder(uri: DatasetSource) -> Path:
    return Path(uri.target) / "val" if (Path(uri.target) / "val").is_dir() else Path(uri.target)

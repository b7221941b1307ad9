"""Splits that are image files: class sub-folders, decoded and preprocessed one slice at a time."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..classifiers.robustbench_package import import_quietly
from ..errors import DatasetError
from ..uris import PREPROCESS

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class ImageFiles:
    """Files below a folder in a fixed order; `names` are their paths in it and stay with them as sample names."""

    uri: str
    root: Path
    names: tuple[str, ...]
    labels: np.ndarray[Any, Any]  # (N,) int64
    preprocess: str | None

    def __len__(self) -> int:
        return len(self.names)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Images `start` .. `stop - 1` as float32 in [0, 1], and their labels; errors as in `take`."""
        return self.take(range(start, min(stop, len(self))))

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Any images as float32 in [0, 1], and their labels.

        Raises:
            DatasetError: for a file that is missing or no image, or images of different sizes.
        """
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
        """sha256 of the preprocessing, labels, names and bytes of the first `n` files."""
        sha = hashlib.sha256(f"{self.preprocess}".encode() + self.labels[:n].tobytes())
        for name in self.names[:n]:
            sha.update(name.encode())
            try:
                with (self.root / name).open("rb") as file:
                    while block := file.read(_BLOCK):
                        sha.update(block)
            except FileNotFoundError as error:
                raise DatasetError(f"{self.uri}: there is no file {self.root / name}") from error
        return sha.hexdigest()

    def _decoded(self, name: str, prepare: Callable[[Any], Tensor]) -> Tensor:
        """One image, uint8 of shape (3, H, W)."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(self.root / name) as image:
                return prepare(image.convert("RGB"))
        except FileNotFoundError as error:
            raise DatasetError(f"{self.uri}: there is no file {self.root / name}") from error
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise DatasetError(f"{self.uri}: {self.root / name} is damaged or no image: {error}") from error


def open_folder(root: str, preprocess: str | None) -> ImageFiles:
    """Class sub-folders, sorted by name as the classes 0, 1, ...; in each the files sorted by name.

    Raises:
        DatasetError: where there is no image in a sub-folder.
    """
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
    return image_files(f"folder:{root}", folder, named, preprocess)


def image_files(uri: str, root: Path, named: Sequence[tuple[str, int]], preprocess: str | None) -> ImageFiles:
    """The split of these (path below the root, label) pairs."""
    labels = np.fromiter((label for _, label in named), np.int64, len(named))
    return ImageFiles(uri, root, tuple(name for name, _ in named), labels, preprocess)


def class_folders(folder: Path) -> list[str]:
    """Names of the sub-folders, sorted: the classes in order."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def preprocessing(name: str | None) -> Callable[[Any], Tensor]:
    """PIL image -> uint8 (3, H, W), as RobustBench's preprocessing of that name does it; "Res224" alone is a square."""
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

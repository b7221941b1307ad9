"""Corrupted copies of known test images, as published: CIFAR-10-C and CIFAR-100-C, ImageNet-C and ImageNet-3DCC.

`cifar10c:ROOT?corruption=fog&severity=3` is a dataset as any other. Its images come in the order of `cifar10`, those of
`imagenetc` in the order of `imagenet`, so that image i of a run on the clean images has its corrupted copies at i.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..config.register import DATASETS
from ..config.uris import ResourceUri
from ..errors import DatasetError
from .arrays import ArrayImages
from .image_files import ImageFiles, class_labels, evaluation_names, image_files

SEVERITIES = (1, 2, 3, 4, 5)
# AlexNet's top-1 errors on ImageNet-C, averaged over the severities, which mCE divides by (Hendrycks and Dietterich
# 2019, table 1 and the code of its authors).
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
    "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip
COMMON = tuple(ALEXNET_ERRORS)
THREE_D = (
    "near_focus", "far_focus", "bit_error", "color_quant", "flash", "fog_3d", "h265_abr", "h265_crf", "iso_noise",
    "low_light", "xy_motion_blur", "z_motion_blur",
)  # fmt: skip

Opener = TypeVar("Opener", bound=Callable[..., Any])


@dataclass(frozen=True)
class Suite:
    """What a published set of corruptions holds."""

    names: tuple[str, ...]
    reference_errors: Mapping[str, float] = field(default_factory=dict)  # that mCE divides by; std's where empty


def with_suite(suite: Suite) -> Callable[[Opener], Opener]:
    """Give an opener of corrupted images the names that its set has; the stage `corruptions` asks for them."""

    def mark(opener: Opener) -> Opener:
        opener.suite = suite  # type: ignore[attr-defined]
        return opener

    return mark


@DATASETS("cifar10c", describes="CIFAR-10-C: one .npy file a corruption", order=10, target="folder",
          forms=("cifar10c:ROOT?corruption=fog&severity=3",), image_shape=(3, 32, 32),
          options={"corruption": ("text", "fog, ..."), "severity": ("1|2|3|4|5", "")})  # fmt: skip
@DATASETS("cifar100c", describes="CIFAR-100-C: one .npy file a corruption", order=11, target="folder",
          forms=("cifar100c:ROOT?corruption=fog&severity=3",), image_shape=(3, 32, 32),
          options={"corruption": ("text", "fog, ..."), "severity": ("1|2|3|4|5", "")})  # fmt: skip
@DATASETS("corrupted", describes="corrupted copies of your own images, in the files of CIFAR-10-C", order=12,
          target="folder", forms=("corrupted:ROOT?corruption=fog&severity=3",),
          options={"corruption": ("text", "fog, ..."), "severity": ("1|2|3|4|5", "")})  # fmt: skip
@with_suite(Suite(COMMON))
def open_corrupted_arrays(uri: ResourceUri) -> ArrayImages:
    """ROOT/fog.npy holds all images at severity 1, then all at severity 2, and so on; ROOT/labels.npy their labels.

    Raises:
        DatasetError: for a corruption that is not there, and for files of other lengths.
    """
    root = Path(uri.target)
    there = sorted(path.stem for path in root.glob("*.npy") if path.stem != "labels")
    corruption, severity = _chosen(uri, there)
    labels, images = _array(root / "labels.npy"), _array(root / f"{corruption}.npy")
    if labels.ndim != 1 or len(labels) != len(images) or len(labels) % len(SEVERITIES):
        raise DatasetError(
            f"{uri.text}: {corruption}.npy {images.shape} and labels.npy {labels.shape} are not as many images with "
            f"labels at each of {len(SEVERITIES)} severities"
        )
    n = len(labels) // len(SEVERITIES)
    rows = slice((severity - 1) * n, severity * n)
    return ArrayImages(uri.text, images[rows], labels[rows])


@DATASETS("imagenetc", describes="ImageNet-C: a folder a corruption, in it one a severity", order=13, target="folder",
          forms=("imagenetc:ROOT?corruption=fog&severity=3",),
          options={"corruption": ("text", "fog, ..."), "severity": ("1|2|3|4|5", ""),
                   "preprocess": ("preprocess", "none by default: the images are 224 x 224")})  # fmt: skip
@with_suite(Suite(COMMON, ALEXNET_ERRORS))
def open_imagenet_c(uri: ResourceUri) -> ImageFiles:
    """RobustBench's 5000 images under ROOT/fog/3/n01440764/; errors as in `_corrupted_files`."""
    return _corrupted_files(uri)


@DATASETS("imagenet3dcc", describes="ImageNet-3DCC: a folder a corruption, in it one a severity", order=14,
          target="folder", forms=("imagenet3dcc:ROOT?corruption=fog_3d&severity=3",),
          options={"corruption": ("text", "fog_3d, ..."), "severity": ("1|2|3|4|5", ""),
                   "preprocess": ("preprocess", "none by default: the images are 224 x 224")})  # fmt: skip
@with_suite(Suite(THREE_D))
def open_imagenet_3dcc(uri: ResourceUri) -> ImageFiles:
    """RobustBench's 5000 images under ROOT/fog_3d/3/n01440764/; errors as in `_corrupted_files`."""
    return _corrupted_files(uri)


def _corrupted_files(uri: ResourceUri) -> ImageFiles:
    """Those of RobustBench's 5000 that are there, in the order and with the labels of `imagenet:`.

    Raises:
        DatasetError: for a corruption or severity that is not there, and where none of the images is.
    """
    root = Path(uri.target)
    corruption, severity = _chosen(uri, sorted(path.name for path in root.iterdir() if path.is_dir()))
    folder = root / corruption / str(severity)
    present = [name for name in evaluation_names() if (folder / name).is_file()]
    if not present:
        others = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
        raise DatasetError(
            f"{uri.text}: none of RobustBench's images is under {folder}; {folder.parent} has the severities "
            f"{', '.join(others) or 'none'}"
        )
    named = [(name, class_labels()[name.partition("/")[0]]) for name in present]
    return image_files(uri.text, folder, named, uri.option("preprocess"))


def _chosen(uri: ResourceUri, there: list[str]) -> tuple[str, int]:
    """The corruption and severity that the URI names, of those that are there."""
    corruption, severity = uri.option("corruption"), uri.option("severity")
    if corruption is None or severity is None:
        raise DatasetError(f"{uri.text}: name one, as in {uri.scheme}:{uri.target}?corruption=fog&severity=3")
    if corruption not in there:
        raise DatasetError(f"{uri.text}: {uri.target} has no {corruption!r}; it has: {', '.join(there) or 'none'}")
    return corruption, int(severity)


def _array(path: Path) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="c", allow_pickle=False)  # torch warns of read-only
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is missing or no array: {error}") from error
    return array

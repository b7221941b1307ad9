"""`imagenet:ROOT`: RobustBench's 5000 fixed validation images, in its order and with its labels.

ROOT is the validation folder with one sub-folder a class (n01440764, ...), or the folder above it with a `val`. Labels
are the positions of the 1000 classes in WordNet order, as in RobustBench's loader, which takes them from the
sub-folders; where some images or classes are missing, the others keep labels and order, and a warning counts them.
"""

import json
import logging
from functools import cache
from pathlib import Path

from ..classifiers.robustbench_package import robustbench_file
from ..errors import DatasetError
from ..uris import IMAGENET_PREPROCESS
from .image_files import ImageFiles, image_files

logger = logging.getLogger(__name__)


@cache
def evaluation_names() -> tuple[str, ...]:
    """RobustBench's list: "n09468604/ILSVRC2012_val_00015253.JPEG" and 4999 more."""
    return tuple(robustbench_file("helper_files/imagenet_test_image_ids.txt").read_text().split())


@cache
def class_labels() -> dict[str, int]:
    """WordNet id -> label."""
    labels: dict[str, int] = json.loads(robustbench_file("helper_files/imagenet_class_to_id_map.json").read_text())
    return labels


def open_imagenet(root: str, preprocess: str | None) -> ImageFiles:
    """Those of the 5000 images that are under `root`.

    Raises:
        DatasetError: where none is.
    """
    folder = Path(root) / "val" if (Path(root) / "val").is_dir() else Path(root)
    present = [name for name in evaluation_names() if (folder / name).is_file()]
    if not present:
        raise DatasetError(
            f"imagenet:{root}: none of RobustBench's {len(evaluation_names())} images is under {folder.absolute()}; "
            f"the first should be {folder / evaluation_names()[0]} (the validation images in one sub-folder a class)"
        )
    if len(present) < len(evaluation_names()):
        logger.warning("imagenet:%s: %d of the %d images are there", root, len(present), len(evaluation_names()))
    named = [(name, class_labels()[name.partition("/")[0]]) for name in present]
    return image_files(f"imagenet:{root}", folder, named, preprocess or IMAGENET_PREPROCESS)

"""Add a stage: the accuracy of all classifiers under common corruptions.

Name this file in a configuration whose images are those of the corrupted copies, and give the stage its key:

    extensions: [examples/corruptions.py]
    corruptions: {folder: data/CIFAR-10-C}

`mixednuts run CONFIG` then classifies every copy on the workers and resumes after an interruption; with `--only
corruptions` it runs this stage alone. The files are those of CIFAR-10-C: `<folder>/fog.npy` holds all images at
severity 1, then all at severity 2, up to 5. The report gets a row and a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import Field

from mixednuts_dist.config.register import STAGES
from mixednuts_dist.config.section import Section
from mixednuts_dist.errors import DatasetError
from mixednuts_dist.stages.stage import Stage, classifier_names

if TYPE_CHECKING:
    from mixednuts_dist.distributed.tasks import Columns, Counts
    from mixednuts_dist.distributed.workbench import Workbench
    from mixednuts_dist.stages.runs import Run
    from mixednuts_dist.storage.partitions import Partition

N_SEVERITIES = 5
NAMES = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip


class CorruptionsKeys(Section):
    """The keys of the stage in a configuration."""

    folder: str = Field(description="the folder with one .npy file per corruption")
    names: tuple[str, ...] = Field(default=NAMES, min_length=1, description="the corruptions; all 15 by default")


@STAGES("corruptions", describes="accuracy under common corruptions", order=10, names_files=True)
class Corruptions(Stage):
    """Record which classifiers are right on each corrupted copy of an image."""

    Keys = CorruptionsKeys
    keys: CorruptionsKeys
    of_mixture = True

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        """Return one (B, S, M) column per corruption and a (B, M) column for the clean images."""
        x, y = worker.images(partition)
        models = {**worker.networks, worker.model_name: worker.model}

        def right(images: torch.Tensor) -> torch.Tensor:
            found = [worker.logits(model, images).argmax(dim=1) == y for model in models.values()]
            return torch.stack(found, dim=1)

        columns = {"clean": right(x)}
        for name in self.keys.names:
            copies_SBHWC = corrupted_images(self.keys.folder, name)[:, partition.start : partition.stop]
            if copies_SBHWC.shape[1] != len(x):
                raise DatasetError(f"{self.keys.folder}/{name}.npy has too few images for {partition}")
            copies = [_tensor(images).to(x.device) for images in copies_SBHWC]
            columns[name] = torch.stack([right(images) for images in copies], dim=1)
        robust_B = torch.stack([columns[name][..., -1].all(dim=1) for name in self.keys.names]).all(dim=0)
        n_forward = len(x) * len(worker.networks) * (1 + N_SEVERITIES * len(self.keys.names))
        return columns, worker.counts(worker.model_name, worker.logits(worker.model, x), y, robust_B, n_forward)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        """Return the passes per image, for `mixednuts estimate`."""
        return {self.model_name(opened.config): (1 + N_SEVERITIES * len(self.keys.names), 0)}

    def words(self) -> str:
        """Describe the stage's rows in the report's table."""
        return f"right under each of {len(self.keys.names)} corruptions at {N_SEVERITIES} severities"

    def outcomes(self, opened: Run) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return one row of the accuracy table per classifier: right under every corruption and severity."""
        rows = self.rows(opened, ["clean", *self.keys.names])
        every_NM = torch.stack([rows[name].all(dim=1) for name in self.keys.names]).all(dim=0)
        names = (f"{name}, corrupted" for name in classifier_names(opened.config))
        return dict(zip(names, zip(rows["clean"].T, every_NM.T, strict=True), strict=True))

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """Return each classifier's accuracy per severity and its mCE relative to the first classifier."""
        rows = self.rows(opened, ["clean", *self.keys.names])
        right_MCSN = torch.stack([rows[name] for name in self.keys.names]).permute(3, 0, 2, 1)
        errors_MC = (~right_MCSN).double().mean(dim=(2, 3))
        names = classifier_names(opened.config)
        table: list[list[object]] = [
            [
                name, clean_N,
                *(round(100 * float(right_CSN[:, s].double().mean()), 1) for s in range(N_SEVERITIES)),
                mean_corruption_error(errors_C.tolist(), errors_MC[0].tolist()),
            ]
            for name, clean_N, right_CSN, errors_C in zip(names, rows["clean"].T, right_MCSN, errors_MC, strict=True)
        ]  # fmt: skip
        severities = [f"severity {s + 1} (%)" for s in range(N_SEVERITIES)]
        return {"common corruptions": (["classifier", "clean", *severities, f"mCE relative to {names[0]} (%)"], table)}


def corrupted_images(folder: str, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Map the copies of one corruption, (S, N, H, W[, C]) uint8.

    Raises:
        DatasetError: if the file is missing or does not hold the same number of images at every severity.
    """
    path = Path(folder, f"{name}.npy")
    try:
        images = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{path} cannot be read as an array: {error}. Name a folder in CIFAR-10-C's format"
        ) from error
    if len(images) % N_SEVERITIES or images.dtype != np.uint8:
        raise DatasetError(f"{path} does not hold uint8 images at {N_SEVERITIES} severities")
    copies: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = images.reshape(N_SEVERITIES, -1, *images.shape[1:])
    return copies


def mean_corruption_error(errors: list[float], reference: list[float]) -> float | None:
    """Return mCE in percent: the mean over the corruptions of error / reference error; None if a reference is 0.

    Source: Hendrycks and Dietterich (2019), section 3.
    """
    if not all(reference):
        return None
    return round(100 * math.fsum(each / base for each, base in zip(errors, reference, strict=True)) / len(errors), 1)


def _tensor(images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    """Convert (B, H, W[, C]) uint8 to (B, C, H, W) float32 in [0, 1]."""
    pixels = torch.from_numpy(images)
    return (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float().div(255)

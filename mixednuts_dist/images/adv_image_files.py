"""Read adversarial images from a file, in the order of the split or with sample ids.

Formats: .pt (a tensor, or a dict with `x_adv` or AutoAttack's `adv_complete`), .npy, .npz (the same names), and Parquet
files or folders with the columns `sample_id` and `x_adv`, as runs write them. Dicts and .npz files may also hold
`sample_id`. Files with pickled objects are rejected, because unpickling could run code.

Shapes: N adversarial images in the file, B requested images, C x H x W.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..config.threat import ThreatModel
from ..errors import DatasetError, reason_of
from ..norms.ball import ball_of
from ..storage.tables import to_tensor

_NAMES = ("x_adv", "adv_complete")  # ours and AutoAttack's


@dataclass(frozen=True)
class AdvImages:
    """Adversarial images from a file: float32, or uint8 in 255ths."""

    path: str
    x_adv_NCHW: Tensor
    rows: Mapping[int, int]  # sample id -> row

    def require_match(self, n_images: int, image_shape: Sequence[int]) -> None:
        """Check that the adversarial images fit a run of `n_images` images (C, H, W).

        Raises:
            DatasetError: if their shape differs, or if none of their sample ids belongs to the run.
        """
        shape = tuple(self.x_adv_NCHW.shape[1:])
        if shape != tuple(image_shape):
            raise DatasetError(f"{self.path}: its images have the shape {shape}, the run's images {tuple(image_shape)}")
        if not any(0 <= each < n_images for each in self.rows):
            raise DatasetError(
                f"{self.path}: the sample ids are {min(self.rows)} to {max(self.rows)}, and this run has 0 to "
                f"{n_images - 1}"
            )

    def checked(
        self, sample_ids: Sequence[int], x_BCHW: Tensor, threat: ThreatModel
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the adversarial images of `sample_ids`, and columns about the images in the file.

        The clean image replaces an image that is missing or not valid. The columns (B,) are `given` (in the file),
        `in_range` (within [0, 1]), `counts` (given, in range and in the ball), and `distance` in the threat's norm.
        """
        given_B = torch.tensor([each in self.rows for each in sample_ids], device=x_BCHW.device)
        found = self.x_adv_NCHW[[self.rows[each] for each in sample_ids if each in self.rows]]
        x_adv = x_BCHW.clone()
        x_adv[given_B] = (found.float() / 255 if found.dtype == torch.uint8 else found.float()).to(x_BCHW.device)
        ball, pixels = ball_of(threat), x_adv.flatten(1)
        in_range_B = (pixels.amin(dim=1) >= 0) & (pixels.amax(dim=1) <= 1)
        counts_B = given_B & in_range_B & ball.contains(x_adv, x_BCHW)
        tried = torch.where(counts_B[:, None, None, None], x_adv, x_BCHW)
        distance_B = ball.length(x_adv - x_BCHW).double()
        return tried, {"given": given_B, "in_range": in_range_B, "counts": counts_B, "distance": distance_B}


@cache
def read_adv_images(path: str) -> AdvImages:
    """Read and check a file of adversarial images, once per process.

    Raises:
        DatasetError: for a file that is missing, damaged, pickled, or holds no finite images.
    """
    files = _files(Path(path))
    try:
        values, ids = _read(files)
        x_adv_NCHW = torch.as_tensor(values)
    except Exception as error:  # at damaged bytes the parsers raise almost any of Python's errors
        raise DatasetError(
            f"{path} holds no images that can be read (a tensor or an array x_adv): {reason_of(error)}"
        ) from error
    if x_adv_NCHW.dim() != 4 or not len(x_adv_NCHW) or len(x_adv_NCHW) != len(ids):
        raise DatasetError(
            f"{path}: {tuple(x_adv_NCHW.shape)} with {len(ids)} sample ids are not N images (N, C, H, W)"
        )
    if x_adv_NCHW.dtype != torch.uint8 and not x_adv_NCHW.is_floating_point():
        raise DatasetError(f"{path}: pixels are {x_adv_NCHW.dtype}; store floats in [0, 1], or uint8")
    if not bool(torch.isfinite(x_adv_NCHW).all()):
        raise DatasetError(f"{path}: some pixels are NaN or infinite")
    if len(set(ids)) < len(ids):
        raise DatasetError(f"{path}: {len(ids) - len(set(ids))} sample ids appear more than once")
    return AdvImages(path, x_adv_NCHW, {each: row for row, each in enumerate(ids)})


@cache
def adv_images_checksum(path: str) -> str:
    """Return the sha256 of a file, or of a folder's Parquet files in order. Raises DatasetError if none exists."""
    sha = hashlib.sha256()
    for each in _files(Path(path)):
        with each.open("rb") as file:
            hashlib.file_digest(file, lambda: sha)
    return sha.hexdigest()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DatasetError(f"{path}: there is no such file, and no folder of Parquet files")
    return files


def _read(files: Sequence[Path]) -> tuple[Any, Sequence[int]]:
    """Return images and their sample ids, by default 0, 1, and so on."""
    path = files[0]
    if path.suffix == ".parquet":
        table = pq.read_table(files, columns=["sample_id", "x_adv"])
        return to_tensor(table.column("x_adv"), table.schema.field("x_adv")), table.column("sample_id").to_pylist()
    is_torch = path.suffix in (".pt", ".pth")
    held = torch.load(path, "cpu", weights_only=True) if is_torch else np.load(path, allow_pickle=False)
    if isinstance(held, torch.Tensor | np.ndarray):
        return held, range(len(held))
    name = next((name for name in _NAMES if name in held), None)
    if name is None:
        raise ValueError(f"it holds {sorted(map(str, held))[:10]}; name the images x_adv")
    values = held[name]  # an .npz file reads them each time
    return values, [int(each) for each in held["sample_id"]] if "sample_id" in held else range(len(values))

"""The stored adversarial examples of earlier stages, as a worker reads them.

Shapes: B images of a partition, C x H x W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.uris import travelled
from ..storage.partitions import Partition
from ..storage.records import SearchRound

if TYPE_CHECKING:  # `status` works without PyTorch
    from torch import Tensor, nn

    from ..distributed.workbench import Workbench
    from ..images.adv_image_files import CheckedAdvImages


@dataclass(frozen=True)
class StoredPoints:
    """Adversarial examples that an earlier stage has stored: columns of its files, one row per image."""

    stage: str
    content_hash: str
    columns: tuple[str, ...] = ("x_adv",)
    n_images: int | None = None  # partitions from this image on have no file


def round_folder(number: int) -> str:
    """Return the folder of the rows of a refinement round."""
    return f"search/round-{number}"


def points_of_round(done: SearchRound) -> StoredPoints:
    """Return the adversarial examples that a refinement round has stored."""
    columns = tuple(f"x_adv_{i}" for i in range(len(done.attacked)))
    return StoredPoints(round_folder(done.round), done.content_hash, columns)


def read_points(worker: Workbench, partition: Partition, points: Sequence[StoredPoints]) -> list[Tensor]:
    """Return (B, C, H, W) for each column; a row without an example is the clean image."""
    x, _ = worker.images(partition)
    found = []
    for source in points:
        if source.n_images is not None and partition.start >= source.n_images:
            found.append(x)
            continue
        found += [worker.stored(partition, source.stage, source.content_hash, column) for column in source.columns]
    return found


def held_points(worker: Workbench, partition: Partition, path: str) -> CheckedAdvImages:
    """Return the examples for the images of a partition from a submitted file, compared with the threat model."""
    from ..images.adv_image_files import read_adv_images

    x, _ = worker.images(partition)
    given = read_adv_images(travelled(worker.spec.working_folder)(path))
    return given.checked(range(partition.start, partition.stop), x, worker.spec.threat)


def hardest_points(worker: Workbench, model: nn.Module, x: Tensor, y: Tensor, points: Sequence[Tensor]) -> Tensor:
    """Return the point of each image at which the margin of the model is the smallest, (B, C, H, W).

    Rows without an example take no pass; most rows of a refinement round have none.
    """
    import torch

    from ..mixing.margins import log_one_minus_signed_margin

    best, everywhere = points[0].clone(), torch.ones_like(y, dtype=torch.bool)
    gap = log_one_minus_signed_margin(worker.logits(model, best), y)
    later = [(x_adv, (x_adv != x).flatten(1).any(dim=1)) for x_adv in points[1:]]
    for x_adv, is_point in [(x, everywhere), *later] if later else []:
        rows = is_point.nonzero().squeeze(1)
        if len(rows):
            found = log_one_minus_signed_margin(worker.logits(model, x_adv[rows]), y[rows])
            smaller = found > gap[rows]
            best[rows[smaller]], gap[rows[smaller]] = x_adv[rows[smaller]], found[smaller]
    return best

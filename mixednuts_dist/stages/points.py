"""The attacked images that earlier stages have left, as a worker reads them.

Shapes: B images of a piece, C x H x W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.partitions import Partition
from ..storage.records import SearchRound

if TYPE_CHECKING:  # what only looks at a run does without PyTorch
    from torch import Tensor, nn

    from ..distributed.workbench import Workbench


@dataclass(frozen=True)
class StoredPoints:
    """Attacked images that an earlier stage has left: columns of its files, one row an image."""

    stage: str
    fingerprint: str
    columns: tuple[str, ...] = ("x_adv",)


def round_folder(number: int) -> str:
    """Where the rows of a round of the search lie."""
    return f"search/round-{number}"


def points_of_round(done: SearchRound) -> StoredPoints:
    """The attacked images that a round has stored, as a later stage reads them."""
    columns = tuple(f"x_adv_{i}" for i in range(len(done.attacked)))
    return StoredPoints(round_folder(done.round), done.fingerprint, columns)


def read_points(worker: Workbench, piece: Partition, points: Sequence[StoredPoints]) -> list[Tensor]:
    """(B, C, H, W) for each column; a row without a point is the clean image."""
    x, _ = worker.images(piece)
    found = []
    for source in points:
        for column in source.columns:
            x_adv = worker.stored(piece, source.stage, source.fingerprint, column)
            there = x_adv.flatten(1).any(dim=1)
            found.append(x_adv.where(there[:, None, None, None], x))
    return found


def hardest_points(worker: Workbench, model: nn.Module, y: Tensor, points: Sequence[Tensor]) -> Tensor:
    """Of each image's points the one at which the model's margin is the smallest, (B, C, H, W)."""
    import torch

    from ..mixing.margins import log_one_minus_signed_margin

    gaps = torch.stack([log_one_minus_signed_margin(worker.logits(model, x_adv), y) for x_adv in points])
    return torch.stack(list(points))[gaps.argmax(dim=0), torch.arange(len(y), device=y.device)]

"""The attacked images that earlier stages have left, as a worker reads them.

Shapes: B images of a piece, C x H x W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.uris import travelled
from ..storage.partitions import Partition
from ..storage.records import SearchRound

if TYPE_CHECKING:  # what only looks at a run does without PyTorch
    from torch import Tensor, nn

    from ..distributed.workbench import Workbench
    from ..images.points import HeldPoints


@dataclass(frozen=True)
class StoredPoints:
    """Attacked images that an earlier stage has left: columns of its files, one row an image."""

    stage: str
    fingerprint: str
    columns: tuple[str, ...] = ("x_adv",)
    n_images: int | None = None  # partitions from this image on have no file


def round_folder(number: int) -> str:
    """Where the rows of a round of the search lie."""
    return f"search/round-{number}"


def points_of_round(done: SearchRound) -> StoredPoints:
    """The attacked images that a round has stored, as a later stage reads them."""
    columns = tuple(f"x_adv_{i}" for i in range(len(done.attacked)))
    return StoredPoints(round_folder(done.round), done.fingerprint, columns)


def bits_apart(x_adv_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
    """What is stored of float32 points: by how many floats each pixel is away from the image's, (B, C, H, W) int32.

    Nothing is lost, and it takes less than half of the pixels' bytes: in Linf three pixels of four end at a side of
    their interval, and pixels of one value then have few differences.

    Example:
        >>> import torch
        >>> x, x_adv = torch.rand(2, 1, 3, 3), torch.rand(2, 1, 3, 3)
        >>> torch.equal(moved_by(bits_apart(x_adv, x), x), x_adv)
        True
    """
    import torch

    return x_adv_BCHW.view(torch.int32) - x_BCHW.view(torch.int32)  # modulo 2^32, as is the sum


def moved_by(bits_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
    """The points whose differences `bits_apart` gave."""
    import torch

    return (x_BCHW.view(torch.int32) + bits_BCHW).view(torch.float32)


def read_points(worker: Workbench, piece: Partition, points: Sequence[StoredPoints]) -> list[Tensor]:
    """(B, C, H, W) for each column; a row without a point is the clean image."""
    x, _ = worker.images(piece)
    found = []
    for source in points:
        if source.n_images is not None and piece.start >= source.n_images:
            found.append(x)
            continue
        for column in source.columns:
            stored = worker.stored(piece, source.stage, source.fingerprint, column)
            if stored.is_floating_point():  # of an attack: zeros where is no point
                there = stored.flatten(1).any(dim=1)
                found.append(stored.where(there[:, None, None, None], x))
            else:
                found.append(moved_by(stored, x))
    return found


def held_points(worker: Workbench, piece: Partition, path: str) -> HeldPoints:
    """The points of a file that somebody handed in, of a piece's images."""
    from ..images.points import read_points_file

    x, _ = worker.images(piece)
    given = read_points_file(travelled(worker.spec.working_folder)(path))
    return given.held_against(range(piece.start, piece.stop), x, worker.spec.threat)


def hardest_points(worker: Workbench, model: nn.Module, x: Tensor, y: Tensor, points: Sequence[Tensor]) -> Tensor:
    """Of each image's points the one at which the model's margin is the smallest, (B, C, H, W).

    The model passes the points alone: most rows of a round hold none, and are the clean image.
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

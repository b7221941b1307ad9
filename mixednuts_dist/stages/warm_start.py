"""The adversarial examples that earlier stages have stored, as a worker reads them for a warm start.

Shapes: B images of a partition, C x H x W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.partitions import Partition
from ..storage.records import SearchRound

if TYPE_CHECKING:  # `status` works without PyTorch
    from torch import Tensor, nn

    from ..distributed.workbench import Workbench


@dataclass(frozen=True)
class StoredExamples:
    """Columns of adversarial examples in an earlier stage's files; a row without an example has the clean image."""

    stage: str
    content_hash: str
    columns: tuple[str, ...] = ("x_adv",)
    n_images: int | None = None  # partitions from this image on have no file

    def read(self, worker: Workbench, partition: Partition) -> list[Tensor]:
        """Return (B, C, H, W) for each column; the clean images if the partition has no file."""
        if self.n_images is not None and partition.start >= self.n_images:
            return [worker.images(partition)[0]]
        return [worker.stored(partition, self.stage, self.content_hash, column) for column in self.columns]


def round_folder(number: int) -> str:
    """Return the folder of the rows of a refinement round."""
    return f"search/round-{number}"


def examples_of_round(done: SearchRound) -> StoredExamples:
    """Return the adversarial examples that a refinement round has stored."""
    columns = tuple(f"x_adv_{i}" for i in range(len(done.attacked)))
    return StoredExamples(round_folder(done.round), done.content_hash, columns)


def hardest_examples(worker: Workbench, model: nn.Module, x: Tensor, y: Tensor, examples: Sequence[Tensor]) -> Tensor:
    """Return the example of each image at which the margin of the model is the smallest, (B, C, H, W).

    If refinement rounds have added examples, the clean images are compared, too.
    """
    import torch

    from ..mixing.margins import log_one_minus_signed_margin

    hardest, *others = examples
    gap = log_one_minus_signed_margin(worker.logits(model, hardest), y)
    for x_adv in (x, *others) if others else ():
        found = log_one_minus_signed_margin(worker.logits(model, x_adv), y)
        hardest = torch.where((found > gap)[:, None, None, None], x_adv, hardest)
        gap = gap.maximum(found)
    return hardest

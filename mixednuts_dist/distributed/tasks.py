"""What the driver sends to a worker: what a stage computes of each piece of the images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage.partitions import Partition

if TYPE_CHECKING:  # what only looks at a run does without PyTorch
    from torch import Tensor

    from ..images.datasets import Dataset
    from ..mixing.mixture import Mixture
    from .workbench import Workbench

Columns = dict[str, "Tensor"]  # name -> one row an image
Summary = dict[str, Any]  # the counts of the receipt, by its fields' names


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a stage asks of each partition; it travels to the workers."""

    stage: str  # the folder of its files
    fingerprint: str  # of all that its rows depend on
    mixture: Mixture | None = None  # that `worker.model` is; rob where there is none

    def write(self, dataset: Dataset, partition: Partition) -> Any:  # noqa: ARG002
        """Write a file of a task's own and return its receipt; None leaves `compute` and the worker to write rows."""
        return None

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        """The rows of a piece, beside `sample_id` and `label`, and the counts of its receipt (`worker.summary`)."""
        raise NotImplementedError(f"{type(self).__name__} does not define what it computes")

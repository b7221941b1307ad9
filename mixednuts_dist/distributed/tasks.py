"""The tasks that the driver sends to the workers of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage.partitions import Partition

if TYPE_CHECKING:  # commands that only look at a run do not import PyTorch
    from torch import Tensor

    from ..images.datasets import Dataset
    from ..mixing.mixture import Mixture
    from .workbench import Workbench

Columns = dict[str, "Tensor"]  # name -> one row per image
Counts = dict[str, Any]  # name -> value, of fields of `PartitionSummary`


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of a stage on each partition."""

    stage: str  # the folder of its files
    content_hash: str  # hash of everything that determines its rows
    mixture: Mixture | None = None  # the mixed classifier `worker.model`; if None, `worker.model` is the robust one
    n_passes: float = 20_000  # maximum forward passes per image, for time limits; the default is twice AutoAttack's

    def write(self, dataset: Dataset, partition: Partition) -> Any:  # noqa: ARG002
        """Write a file in the task's own format and return its summary; by default the worker writes rows."""
        return None

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        """Return a partition's columns, except for `sample_id` and `label`, and its counts (`worker.counts`)."""
        raise NotImplementedError(f"{type(self).__name__} does not define what it computes")

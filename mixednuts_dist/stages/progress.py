"""The events that stages report while they work; the command line and the logs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..storage.records import PartitionSummary


class RunProgress:
    """Receives the events of all stages, in the driver's main thread, and ignores them unless a subclass shows them."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[PartitionSummary]) -> None:
        """Receive the start of a stage on `n_images` images; earlier commands finished the partitions in `done`."""

    def partition_done(self, summary: PartitionSummary) -> None:
        """Receive the summary of a partition that a worker has written."""

    def workers_seen(self, ready: int, asked: int) -> None:
        """Receive, every few seconds, the number of workers that are ready and the number that the stage requested."""

    def stage_finished(self, stage: str, message: str) -> None:
        """Receive the end of a stage, with its outcome in one line."""

"""The events that stages report while they work; the command line and the logs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..storage.records import PartitionSummary


class RunProgress:
    """Receives the events of all stages, in the driver's main thread, and ignores them unless a subclass shows them."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[PartitionSummary]) -> None:
        """A stage starts on `n_images` images; earlier commands have finished the partitions in `done`."""

    def partition_done(self, summary: PartitionSummary) -> None:
        """A worker has written one more partition."""

    def workers_seen(self, ready: int, asked: int) -> None:
        """Every few seconds: `ready` workers have started, and the stage uses up to `asked`."""

    def stage_finished(self, stage: str, message: str) -> None:
        """The stage is complete; `message` is its outcome in one line."""

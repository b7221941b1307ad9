"""What the stages report while they work. Terminal and logs are other rooms' business."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..storage.records import Receipt


class RunProgress(Protocol):
    """Called by the stages, always from the driver's main thread."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        """`n_images` in all; `done` are the partitions that earlier runs have left finished."""

    def partition_done(self, receipt: Receipt) -> None:
        """One more partition is written."""

    def stage_finished(self, stage: str, message: str) -> None:
        """The stage is complete; `message` says in a line what came out or that there was nothing to do."""


@runtime_checkable
class WatchesWorkers(Protocol):
    """A `RunProgress` that also takes the number of workers, every few seconds."""

    def workers_seen(self, ready: int, asked: int) -> None:
        """`ready` of `asked` workers are there; the others wait for room on the cluster."""


class Silent:
    """Ignores all progress events."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        pass

    def partition_done(self, receipt: Receipt) -> None:
        pass

    def stage_finished(self, stage: str, message: str) -> None:
        pass

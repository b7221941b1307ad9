"""Early stopping of an evaluation, as soon as the robust accuracy is known precisely enough."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..storage.partitions import Partition
from ..storage.records import PartitionSummary
from .confidence_sequence import ConfidenceSequence
from .runs import Run, finished_partitions, require_complete


class EarlyStop:
    """Counts partitions in random order until the confidence interval of the robust accuracy is narrow enough.

    The values of the confidence sequence are each partition's share of robust images. Robust images take longer, so
    partitions finish in another order. Only partitions before the first unfinished one count, so that the cost of an
    image does not influence the result.

    Args:
        points: half the width of an interval that is narrow enough, in percentage points.
    """

    def __init__(self, partitions: Sequence[Partition], seed: int, points: float) -> None:
        order = torch.randperm(len(partitions), generator=torch.Generator().manual_seed(seed)).tolist()
        self.order = [partitions[i] for i in order]
        self._places = {partition.index: place for place, partition in enumerate(self.order)}
        self._points, self._robust = points, dict[int, int]()  # place -> robust images
        self._size = max(map(len, partitions))
        self._scale = len(partitions) * self._size / sum(map(len, partitions))  # the last partition may be shorter
        self._bounds = ConfidenceSequence(len(partitions))

    def place(self, partition: Partition) -> int:
        """Return the partition's place in the random order."""
        return self._places[partition.index]

    def enough(self, summaries: Iterable[PartitionSummary]) -> bool:
        """Add finished partitions; return whether the interval is narrow enough."""
        self._robust |= {self._places[summary.partition]: summary.robust for summary in summaries}
        while not self._known() and self._bounds.n_seen in self._robust:
            self._bounds.add(self._robust[self._bounds.n_seen] / self._size)
        return self._known()

    def _known(self) -> bool:
        low, high = self.interval
        return 100 * (high - low) <= 2 * self._points

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the robust accuracy on all images, which holds at all looks together with 95% confidence."""
        low, high = self._bounds.interval
        return low * self._scale, high * self._scale

    @property
    def counted(self) -> list[Partition]:
        """The partitions that the interval rests on, in the order of their images."""
        return sorted(self.order[: self._bounds.n_seen], key=lambda partition: partition.start)

    def sentence(self) -> str:
        """Return the result as one sentence."""
        (low, high), counted, every = self.interval, sum(map(len, self.counted)), sum(map(len, self.order))
        return (
            f"robust accuracy on all {every:,} images is between {100 * low:.2f}% and {100 * high:.2f}% (95% "
            f"confidence over all looks), from {counted:,} images in randomly drawn partitions"
        )


def early_stop_of(opened: Run) -> EarlyStop | None:
    """Return the configured early stop, without any counted partition; None for an evaluation of all images."""
    until = opened.config.evaluate.until
    return None if until is None else EarlyStop(opened.partitions, opened.config.seed, until)


def evaluated_part(opened: Run, content_hash: str) -> tuple[Run, tuple[str, ...]]:
    """Return the run cut to the partitions that count, and a note for the report if `evaluate.until` has cut it.

    Finished partitions beyond the required ones do not count, because the quick ones are among them.

    Raises:
        MissingArtifact: if the evaluation has not finished.
    """
    stop, finished = early_stop_of(opened), finished_partitions(opened, "evaluate", content_hash)
    if stop is None or len(finished) == len(opened.partitions) or not stop.enough(finished.values()):
        require_complete(opened, "evaluate", content_hash)
        return opened, ()
    note = f"evaluate.until = {opened.config.evaluate.until:g}: {stop.sentence()}. All counts refer to those images."
    return replace(opened, only=tuple(stop.counted)), (note,)

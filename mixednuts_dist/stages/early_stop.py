"""When an evaluation may end early: robust accuracy is known well enough from partitions in random order."""

from collections.abc import Iterable, Sequence

import torch

from ..attacks.sequential import ConfidenceSequence
from ..storage.partitions import Partition
from ..storage.records import Receipt


class EarlyStop:
    """Evaluating partitions in random order until robust accuracy is known well enough.

    The values of the confidence sequence are the partitions' shares of robust images. Partitions finish in another
    order than they were drawn in, robust ones later; counted are those before the first unfinished one, so that what an
    image costs does not decide whether it counts.

    Args:
        points: half the width of the interval that is enough, in percentage points.
    """

    def __init__(self, partitions: Sequence[Partition], seed: int, points: float) -> None:
        order = torch.randperm(len(partitions), generator=torch.Generator().manual_seed(seed)).tolist()
        self.order = [partitions[i] for i in order]
        self._places = {partition.index: place for place, partition in enumerate(self.order)}
        self._points, self._robust = points, dict[int, int]()  # place -> robust images
        self._size = max(map(len, partitions))
        self._scale = len(partitions) * self._size / sum(map(len, partitions))  # the last one may be shorter
        self._bounds = ConfidenceSequence(len(partitions))

    def place(self, partition: Partition) -> int:
        """When it was drawn."""
        return self._places[partition.index]

    def enough(self, receipts: Iterable[Receipt]) -> bool:
        """Take in finished partitions; whether robust accuracy is known by now."""
        for receipt in receipts:
            self._robust[self._places[receipt.partition]] = receipt.robust
        while not self.known and self._bounds.n_seen in self._robust:
            self._bounds.add([self._robust[self._bounds.n_seen] / self._size])
        return self.known

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough."""
        low, high = self.interval
        return 100 * (high - low) <= 2 * self._points

    @property
    def interval(self) -> tuple[float, float]:
        """Of the robust accuracy on all images, right at all looks together with 95 % confidence."""
        low, high = self._bounds.interval
        return low * self._scale, high * self._scale

    @property
    def counted(self) -> list[Partition]:
        """The partitions that it rests on, in the order of their images."""
        return sorted(self.order[: self._bounds.n_seen], key=lambda partition: partition.start)

    def sentence(self) -> str:
        """The result in a sentence."""
        (low, high), counted, every = self.interval, sum(map(len, self.counted)), sum(map(len, self.order))
        return (
            f"robust accuracy on all {every:,} images is between {100 * low:.2f} and {100 * high:.2f} % (95 % "
            f"confidence over all looks), from {counted:,} of them in partitions drawn at random"
        )

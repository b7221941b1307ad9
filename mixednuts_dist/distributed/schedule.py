"""Which piece of work a free worker gets next. No Ray and no clock: the pool and the simulation share it.

Heaviest partitions go first. A worker never gets more than its share of what is left, `1 / (SHARES * workers)`: at
first that is more than a partition, so partitions go out whole; near the end it is less, and partitions are cut into
spans that shrink as the work does (guided self-scheduling), so that all workers end within about one of the last spans.
A partition that was cut is merged into its one file by a worker as soon as its last span is written. How often it was
cut moves no row: an image's noise is keyed by its sample id.

Few images at a time can leave an accelerator waiting for itself, so cutting has a floor. It starts low and rises with
what the run itself shows: a span that got through less than half as many passes a second as its machine can was too
small. (A short span of images that all broke at once is slow in this sense too, and harmless.)
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..storage.partitions import Partition, Span, span_of, uncovered, whole_of, without_overlaps

SHARES = 1.5  # pieces that each worker could still get of what is left
INEFFICIENT = 0.5  # of the most passes a second that its machine has shown: a span below that was too small,
NOTICEABLE = 0.25  # unless it was over in that share of an average piece's time


@dataclass(frozen=True)
class Merge:
    """All spans of a partition are written; they become its file."""

    whole: Partition
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        return f"{self.whole}, merging {len(self.spans)} spans"


Work = Partition | Merge


class WorkQueue:
    """Pieces in the order in which they go out.

    Args:
        partitions: the unfinished ones.
        smallest: images of the smallest spans to begin with; a partition of at most twice as many is never cut.
        weights: expected cost of each partition; its number of images where missing.
        finished_spans: of unfinished partitions, left by an earlier session.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        *,
        smallest: int,
        weights: Mapping[Partition, float] | None = None,
        finished_spans: Sequence[Span] = (),
    ) -> None:
        self.smallest = smallest
        self._weights = weights or {}
        self._seconds, self._n_finished = 0.0, 0  # of all finished pieces
        self._speeds: dict[str, float] = {}  # machine -> the most passes a second that a piece had there
        self._spans: dict[Partition, list[Span]] = {}
        for span in finished_spans:
            self._spans.setdefault(span.whole, []).append(span)
        self._pending: deque[Partition] = deque()
        self._merges: deque[Merge] = deque()
        for partition in sorted(partitions, key=self._weight, reverse=True):
            self._add(partition)
        self._weight_left = sum(map(self._weight, self._pending))

    def __len__(self) -> int:
        return len(self._pending) + len(self._merges)

    def most_pieces(self) -> int:
        """No more workers than this could be of use at the same time."""
        return len(self._merges) + sum(max(1, len(piece) // self.smallest) for piece in self._pending)

    def take(self, n_workers: int) -> Work | None:
        """The next piece for one of `n_workers`; None where nothing waits."""
        if self._merges:
            return self._merges.popleft()
        if not self._pending:
            return None
        piece = self._pending.popleft()
        n_images = self._share(piece, n_workers)
        if len(piece) > n_images and len(whole_of(piece)) > 2 * self.smallest:
            middle = piece.start + n_images
            self._pending.appendleft(span_of(piece, middle, piece.stop))
            piece = span_of(piece, piece.start, middle)
        self._weight_left = max(0.0, self._weight_left - self._weight(piece))
        return piece

    def put_back(self, work: Work) -> None:
        """It failed and is to be tried again, after everything else."""
        if isinstance(work, Merge):
            self._merges.append(work)
            return
        self._pending.append(work)
        self._weight_left += self._weight(work)

    def finished(self, work: Work, *, seconds: float = 0.0, n_forward: int = 0, machine: str = "") -> None:
        """It is written; the last span of a partition makes a merge wait."""
        if isinstance(work, Merge):
            return
        if isinstance(work, Span):
            self._raise_floor(work, seconds, n_forward, self._speeds.get(machine, 0.0))
            spans = self._spans.setdefault(work.whole, [])
            spans.append(work)
            if not uncovered(work.whole, spans):
                self._merges.append(self._merge(work.whole))
        self._n_finished += 1
        self._seconds += seconds
        if seconds > 0:
            self._speeds[machine] = max(self._speeds.get(machine, 0.0), n_forward / seconds)

    def _raise_floor(self, span: Span, seconds: float, n_forward: int, best: float) -> None:
        slow = n_forward < INEFFICIENT * best * seconds
        if slow and seconds * self._n_finished > NOTICEABLE * self._seconds:
            self.smallest = max(self.smallest, 2 * len(span))

    def _add(self, partition: Partition) -> None:
        """What an earlier session has left of it to do."""
        spans = self._spans[partition] = without_overlaps(self._spans.get(partition, []))
        gaps = uncovered(partition, spans)
        self._pending.extend(gaps)
        if not gaps:
            self._merges.append(self._merge(partition))

    def _merge(self, whole: Partition) -> Merge:
        return Merge(whole, tuple(sorted(self._spans.pop(whole), key=lambda span: span.start)))

    def _share(self, piece: Partition, n_workers: int) -> int:
        """A worker's share of what is left, in images of this piece."""
        left = self._weight_left / (SHARES * n_workers)
        return max(self.smallest, math.ceil(left * len(piece) / self._weight(piece)))

    def _weight(self, piece: Partition) -> float:
        whole = whole_of(piece)
        return self._weights.get(whole, float(len(whole))) * len(piece) / len(whole)

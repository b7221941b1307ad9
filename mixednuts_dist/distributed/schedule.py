"""Which piece of work a free worker gets next, and which pieces failed. Uses neither Ray nor a clock.

The pool uses it, and so does the simulated cluster of the tests.

Order: the partitions of the highest expected cost go first. Size: a worker gets at most `1 / (SHARES * workers)` of the
work that is left. At first that is more than a partition, so partitions go out whole. Near the end it is less, so they
are cut into spans that shrink with the work left (guided self-scheduling), and all workers end within about one of the
last spans. When the last span of a partition is written, a worker merges the spans into the partition's file. Cutting
changes no row, because an image's noise is keyed by its sample id.

Smallest span: a batch of few images leaves an accelerator partly idle. The limit starts low. It is raised to twice the
length of a span that passed fewer than half as many images a second as the same machine has done before. (A short span
whose images all broke at once looks slow too; raising the limit for it does no harm.)

Prefetching: a worker is also given the pieces that it gets next, so that their images take the slots that become free.
Pieces are reserved for a worker only while so many are left that they go out whole. A worker for which nothing else is
left takes a piece that is reserved for another one.

Failures: a piece has `max_tries` tries, then it is set aside with its log. A worker process that dies uses up a try of
its piece. A lost machine does not, because spot machines are taken away without any fault of the piece; but a piece
during which `MAX_LOST_MACHINES` machines were lost is set aside as well, so that the run ends.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PartitionFailed, printable
from ..storage.partitions import Partition, Span, span_of, uncovered, whole_of, without_overlaps
from ..storage.store import Store

logger = logging.getLogger(__name__)

SHARES = 1.5  # pieces that each worker could still get of the work left
LEAST_OVERDUE = 300.0  # seconds that any piece may take: as long as workers wait for a storage that does not answer
INEFFICIENT = 0.5  # a span with fewer passes a second than this share of its machine's best was too small,
NOTICEABLE = 0.25  # unless it took less than this share of an average piece's time
PREFETCHED = 2  # pieces that are reserved for a worker beside the one it computes
MAX_LOST_MACHINES = 10  # during one piece, or while it waited to be written
HOPELESS = 3  # after this many times `max_tries` failures and no success the stage ends


@dataclass(frozen=True)
class Merge:
    """The work of joining all spans of a partition into its file."""

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
        finished_spans: of unfinished partitions, which an interrupted run has left.
        in_order: hand the partitions out as they come, not the heaviest first.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        *,
        smallest: int,
        weights: Mapping[Partition, float] | None = None,
        finished_spans: Sequence[Span] = (),
        in_order: bool = False,
    ) -> None:
        self.smallest = smallest
        self._weights = weights or {}
        self._seconds, self._n_finished = 0.0, 0  # of all finished pieces
        self._speeds: dict[str, float] = {}  # machine -> the most passes a second that a piece had there
        self._slowest = 0.0  # the most seconds that a finished piece took, by its expected cost
        self._again: deque[Work] = deque()  # pieces that are overdue at their worker, to be computed by another too
        self._spans: dict[Partition, list[Span]] = {}
        for span in finished_spans:
            self._spans.setdefault(span.whole, []).append(span)
        self._pending: deque[Partition] = deque()
        self._merges: deque[Merge] = deque()
        self._reserved: dict[Any, deque[Partition]] = {}  # worker -> pieces that it gets next
        self._n_reserved = 0  # for all workers
        self._tried: set[Partition] = set()  # pieces that have failed: they are computed without prefetched ones
        for partition in partitions if in_order else sorted(partitions, key=self._weight, reverse=True):
            self._add(partition)
        self._weight_left = sum(map(self._weight, self._pending))

    def __len__(self) -> int:
        return len(self._pending) + len(self._merges) + self._n_reserved

    def stop(self) -> None:
        """Hand out no further piece, because enough are done."""
        self._pending.clear()
        self._reserved.clear()
        self._n_reserved = 0
        self._again.clear()
        self._weight_left = 0.0

    def most_pieces(self) -> int:
        """How many pieces there could be at the same time: more workers than that would get none."""
        return len(self._merges) + sum(max(1, len(piece) // self.smallest) for piece in self._pending)

    def take(self, n_workers: int, worker: Any = None) -> Work | None:
        """The next piece for `worker`, one of `n_workers`; None where nothing waits."""
        if self._merges:
            return self._merges.popleft()
        if reserved := self._reserved.get(worker):
            self._pending.appendleft(reserved.popleft())
            self._n_reserved -= 1
        elif not self._pending and self._n_reserved:
            self._pending.append(max(self._reserved.values(), key=len).pop())
            self._n_reserved -= 1
        if not self._pending:
            return self._again.popleft() if self._again else None
        piece = self._pending.popleft()
        n_images = self._share(piece, n_workers)
        if n_workers > 1 and len(piece) > n_images and len(whole_of(piece)) > 2 * self.smallest:
            middle = piece.start + n_images
            self._pending.appendleft(span_of(piece, middle, piece.stop))
            piece = span_of(piece, piece.start, middle)
        self._weight_left = max(0.0, self._weight_left - self._weight(piece))
        return piece

    def prefetch(self, n_workers: int, worker: Any, piece: Work | None) -> tuple[Partition, ...]:
        """Reserve pieces that `worker` gets after `piece`; none beside a merge or a piece that has failed before."""
        if not isinstance(piece, Partition) or piece in self._tried:
            return ()
        reserved = self._reserved.setdefault(worker, deque())
        while len(reserved) < PREFETCHED and self._pending and self._pending[0] not in self._tried:
            # Only while every worker's share of the work left is a piece and PREFETCHED more: all can hold as many.
            if self._share(self._pending[0], n_workers) < (1 + PREFETCHED) * len(self._pending[0]):
                break
            reserved.append(self._pending.popleft())
            self._n_reserved += 1
        return tuple(reserved)

    def release(self, worker: Any) -> None:
        """Put the pieces that are reserved for `worker` back in front of the others."""
        reserved = self._reserved.pop(worker, deque())
        self._n_reserved -= len(reserved)
        self._pending.extendleft(reversed(reserved))

    def put_back(self, work: Work) -> None:
        """Queue a failed piece once more, behind all others."""
        self.forget_copy(work)
        if isinstance(work, Merge):
            self._merges.append(work)
            return
        self._pending.append(work)
        self._tried.add(work)
        self._weight_left += self._weight(work)

    def seconds_allowed(self, work: Work, times: float) -> float:
        """How long a piece may take: `times` what it would at the pace of the slowest finished one.

        Infinity before any piece is finished. The slowest pace counts because a robust image costs 30 times as much as
        a broken one, so the mean would be too short for a piece of robust images only. The slowest piece also contains
        what a worker does once, such as compiling.
        """
        if not self._n_finished:
            return math.inf
        return max(LEAST_OVERDUE, times * self.seconds_expected(work))

    def seconds_expected(self, work: Work) -> float:
        """What a piece takes at the pace of the slowest finished one; infinity before any is finished."""
        if isinstance(work, Merge):
            return 0.0
        return self._slowest * self._weight(work) if self._n_finished else math.inf

    def hand_out_again(self, work: Work) -> None:
        """Have an overdue piece computed once more: the next worker without other work gets it, uncut."""
        self._again.append(work)

    def forget_copy(self, work: Work) -> None:
        """Do not hand out a second copy of this piece any more."""
        if work in self._again:
            self._again.remove(work)

    def finished(self, work: Work, *, seconds: float = 0.0, n_forward: int = 0, machine: str = "") -> None:
        """Note that a piece is written; after the last span of a partition its merge is queued."""
        self.forget_copy(work)
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
        self._slowest = max(self._slowest, seconds / self._weight(work))
        if seconds > 0:
            self._speeds[machine] = max(self._speeds.get(machine, 0.0), n_forward / seconds)

    def _raise_floor(self, span: Span, seconds: float, n_forward: int, best: float) -> None:
        slow = n_forward < INEFFICIENT * best * seconds
        if slow and seconds * self._n_finished > NOTICEABLE * self._seconds:
            self.smallest = max(self.smallest, 2 * len(span))

    def _add(self, partition: Partition) -> None:
        """Queue what the finished spans leave of the partition to compute."""
        spans = self._spans[partition] = without_overlaps(self._spans.get(partition, []))
        gaps = uncovered(partition, spans)
        self._pending.extend(gaps)
        if not gaps:
            self._merges.append(self._merge(partition))

    def _merge(self, whole: Partition) -> Merge:
        return Merge(whole, tuple(sorted(self._spans.pop(whole), key=lambda span: span.start)))

    def _share(self, piece: Partition, n_workers: int) -> int:
        """A worker's share of the work left, in images of this piece."""
        left = self._weight_left / (SHARES * n_workers)
        return max(self.smallest, math.ceil(left * len(piece) / self._weight(piece)))

    def _weight(self, piece: Partition) -> float:
        whole = whole_of(piece)
        return self._weights.get(whole, float(len(whole))) * len(piece) / len(whole)


def error_log(stage: str, partition: Partition) -> str:
    """Where the log of a partition's last failure lies: `errors/attack-00004.txt`."""
    return f"errors/{stage.replace('/', '-')}-{partition.index:05d}.txt"


@dataclass
class _Record:
    tries: int = 0
    lost_machines: int = 0
    reason: str = ""
    log: str = ""


@dataclass
class Failures:
    """The failed tries of one stage's pieces."""

    store: Store
    stage: str
    max_tries: int
    _records: dict[Work, _Record] = field(default_factory=dict)
    _poison: dict[Work, str] = field(default_factory=dict)  # pieces that are set aside -> the sentence that says why
    _failed_on: set[str] = field(default_factory=set)  # machines
    _any_done: bool = False

    def tries(self, work: Work) -> int:
        """How many of its tries have failed."""
        return self._records[work].tries if work in self._records else 0

    def failed(self, work: Work, reason: str, log: str, machine: str = "") -> bool:
        """One more try is used up; True where another one is left."""
        record = self._records.setdefault(work, _Record())
        reason = printable(reason)
        record.tries, record.reason, record.log = record.tries + 1, reason, log
        self._failed_on.add(machine)
        logger.warning("%s: try %d of %d failed: %s", work, record.tries, self.max_tries, reason)
        if record.tries < self.max_tries:
            return True
        self._set_aside(work, f"failed {record.tries} of {self.max_tries} tries: {reason}", log)
        return False

    def machine_lost(self, work: Work, reason: str, log: str) -> bool:
        """Its machine is lost, or a worker that only waited to write it; True where the piece may be tried again."""
        record = self._records.setdefault(work, _Record())
        record.lost_machines += 1
        if record.lost_machines < MAX_LOST_MACHINES:
            return True
        self._set_aside(
            work, f"lost {record.lost_machines} machines or waiting workers, one after the other: {reason}", log
        )
        return False

    def succeeded(self) -> None:
        """Note that a piece was computed, whether or not it is written."""
        self._any_done = True

    def raise_if_hopeless(self, machines_at_work: set[str]) -> None:
        """Raises PartitionFailed where every try so far has failed, on every machine that is at work.

        Failures on some machines only do not count: one broken machine fails many times before the others have finished
        their first piece.
        """
        if self._any_done or not machines_at_work <= self._failed_on:
            return
        tried = {work: record for work, record in self._records.items() if record.tries}
        n_tries = sum(record.tries for record in tried.values())
        if n_tries < HOPELESS * self.max_tries:
            return
        if not self._poison:
            work, record = next(iter(tried.items()))
            self._set_aside(work, f"failed {record.tries} of {self.max_tries} tries: {record.reason}", record.log)
        raise PartitionFailed(f"{self._sentences()}\nAll of {n_tries} tries have failed, so the rest was not tried")

    def raise_if_poisoned(self) -> None:
        """Raises PartitionFailed, naming each piece that was set aside, with the address of its log."""
        if self._poison:
            raise PartitionFailed(self._sentences())

    def _sentences(self) -> str:
        works = sorted(self._poison, key=lambda work: _partition(work).start)
        return "\n".join(self._poison[work] for work in works)

    def _set_aside(self, work: Work, what: str, log: str) -> None:
        path = error_log(self.stage, _partition(work))
        self._poison[work] = f"{work} {what}. Log: {self.store.address(path)}"
        self.store.write(path, f"{self.stage} {work} {what}\n{log}\n".encode())


def _partition(work: Work) -> Partition:
    return work.whole if isinstance(work, Merge) else whole_of(work)

"""Which piece of work a free worker gets next, and what went wrong with each. No Ray and no clock.

The pool and the simulation share it.

Heaviest partitions go first. A worker never gets more than its share of what is left, `1 / (SHARES * workers)`: at
first that is more than a partition, so partitions go out whole; near the end it is less, and partitions are cut into
spans that shrink as the work does (guided self-scheduling), so that all workers end within about one of the last spans.
A partition that was cut is merged into its one file by a worker as soon as its last span is written. How often it was
cut moves no row: an image's noise is keyed by its sample id.

Few images at a time can leave an accelerator waiting for itself, so cutting has a floor. It starts low and rises with
what the run itself shows: a span that got through less than half as many passes a second as its machine can was too
small. (A short span of images that all broke at once is slow in this sense too, and harmless.)

A worker may be told ahead what it gets next, so that its empty seats can be filled: pieces are claimed for it while so
many are left that they go out whole. A claim is a preference: where nothing else is left, others get the piece.

Tries are counted, and poison is set aside with its log. A process that dies at a piece has used up one of its tries. A
machine that is taken away has not: on spot machines that is nobody's fault. But a piece that takes its machine down
each time must end as well, so lost machines have a bound.
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

SHARES = 1.5  # pieces that each worker could still get of what is left
LEAST_OVERDUE = 300.0  # seconds that any piece may take: as long as a storage that is down is waited for
INEFFICIENT = 0.5  # of the most passes a second that its machine has shown: a span below that was too small,
NOTICEABLE = 0.25  # unless it was over in that share of an average piece's time
AHEAD = 2  # pieces that are claimed for a worker
MAX_LOST_MACHINES = 10  # while it was at one piece, or waited to write it
HOPELESS = 3  # times the tries of a piece, all of them failed: then it is the run, not the piece


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
        self._again: deque[Work] = deque()  # pieces that are overdue where they are
        self._spans: dict[Partition, list[Span]] = {}
        for span in finished_spans:
            self._spans.setdefault(span.whole, []).append(span)
        self._pending: deque[Partition] = deque()
        self._merges: deque[Merge] = deque()
        self._claimed: dict[Any, deque[Partition]] = {}  # worker -> pieces that it gets next
        self._n_claimed = 0  # by all workers
        self._tried: set[Partition] = set()  # pieces that have failed: those are worked on without company
        for partition in partitions if in_order else sorted(partitions, key=self._weight, reverse=True):
            self._add(partition)
        self._weight_left = sum(map(self._weight, self._pending))

    def __len__(self) -> int:
        return len(self._pending) + len(self._merges) + self._n_claimed

    def stop(self) -> None:
        """Hand out no further piece: what is done is enough."""
        self._pending.clear()
        self._claimed.clear()
        self._n_claimed = 0
        self._again.clear()
        self._weight_left = 0.0

    def most_pieces(self) -> int:
        """No more workers than this could be of use at the same time."""
        return len(self._merges) + sum(max(1, len(piece) // self.smallest) for piece in self._pending)

    def take(self, n_workers: int, worker: Any = None) -> Work | None:
        """The next piece for `worker`, one of `n_workers`; None where nothing waits."""
        if self._merges:
            return self._merges.popleft()
        if claimed := self._claimed.get(worker):
            self._pending.appendleft(claimed.popleft())
            self._n_claimed -= 1
        elif not self._pending and self._n_claimed:
            self._pending.append(max(self._claimed.values(), key=len).pop())
            self._n_claimed -= 1
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

    def claim(self, n_workers: int, worker: Any, piece: Work | None) -> tuple[Partition, ...]:
        """What `worker` gets after `piece`, so far as it is known; nothing beside a piece that has failed before."""
        if not isinstance(piece, Partition) or piece in self._tried:
            return ()
        claims = self._claimed.setdefault(worker, deque())
        while len(claims) < AHEAD and self._pending and self._pending[0] not in self._tried:
            # All that is claimed for this worker and as much again for each other one: nobody waits for it in the end.
            if self._share(self._pending[0], n_workers) < (1 + AHEAD) * len(self._pending[0]):
                break
            claims.append(self._pending.popleft())
            self._n_claimed += 1
        return tuple(claims)

    def release(self, worker: Any) -> None:
        """Give back what is claimed for a worker."""
        claims = self._claimed.pop(worker, deque())
        self._n_claimed -= len(claims)
        self._pending.extendleft(reversed(claims))

    def put_back(self, work: Work) -> None:
        """It failed and is to be tried again, after everything else."""
        self.forget_copy(work)
        if isinstance(work, Merge):
            self._merges.append(work)
            return
        self._pending.append(work)
        self._tried.add(work)
        self._weight_left += self._weight(work)

    def seconds_allowed(self, work: Work, times: float) -> float:
        """How long a piece may take: `times` what it would at the pace of the slowest finished one; at first for ever.

        Costs differ 30 times between broken and robust images, so the mean would be too short for a piece that is all
        robust; the slowest piece also contains what a worker does once, compiling for instance.
        """
        if not self._n_finished:
            return math.inf
        return max(LEAST_OVERDUE, times * self.seconds_expected(work))

    def seconds_expected(self, work: Work) -> float:
        """What a piece takes at the pace of the slowest finished one; for ever before any is finished."""
        if isinstance(work, Merge):
            return 0.0
        return self._slowest * self._weight(work) if self._n_finished else math.inf

    def hand_out_again(self, work: Work) -> None:
        """It is overdue: the next worker that nothing else waits for gets the same piece, uncut."""
        self._again.append(work)

    def forget_copy(self, work: Work) -> None:
        """No second copy of it is needed any more."""
        if work in self._again:
            self._again.remove(work)

    def finished(self, work: Work, *, seconds: float = 0.0, n_forward: int = 0, machine: str = "") -> None:
        """It is written; the last span of a partition makes a merge wait."""
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
    """What went wrong in one stage."""

    store: Store
    stage: str
    max_tries: int
    _records: dict[Work, _Record] = field(default_factory=dict)
    _poison: dict[Work, str] = field(default_factory=dict)  # -> what to tell
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
        """Its machine is gone, or a worker that only waited to write it; True where it may have another one."""
        record = self._records.setdefault(work, _Record())
        record.lost_machines += 1
        if record.lost_machines < MAX_LOST_MACHINES:
            return True
        self._set_aside(
            work, f"lost {record.lost_machines} machines or waiting workers, one after the other: {reason}", log
        )
        return False

    def succeeded(self) -> None:
        """A piece is computed, whether written or not: not all of them are hopeless."""
        self._any_done = True

    def raise_if_hopeless(self, machines_at_work: set[str]) -> None:
        """Raises PartitionFailed where all that was tried has failed, and on every machine that is at work.

        One machine alone may be broken, and fails many times before the others have done their first piece.
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
        raise PartitionFailed(f"{self._told()}\nAll of {n_tries} tries have failed, so the rest was not tried")

    def raise_if_poisoned(self) -> None:
        """Raises PartitionFailed, naming each piece that was set aside, with the address of its log."""
        if self._poison:
            raise PartitionFailed(self._told())

    def _told(self) -> str:
        works = sorted(self._poison, key=lambda work: _partition(work).start)
        return "\n".join(self._poison[work] for work in works)

    def _set_aside(self, work: Work, what: str, log: str) -> None:
        path = error_log(self.stage, _partition(work))
        self._poison[work] = f"{work} {what}. Log: {self.store.address(path)}"
        self.store.write(path, f"{self.stage} {work} {what}\n{log}\n".encode())


def _partition(work: Work) -> Partition:
    return work.whole if isinstance(work, Merge) else whole_of(work)

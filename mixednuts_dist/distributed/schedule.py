"""Decide which partition a worker gets next, and record failed partitions and places, without Ray or a clock.

The pool uses this module, and so does the simulated cluster of the benchmarks.
"""

import logging
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PartitionFailed, StoreError, printable
from ..storage.outages import PATIENCE_SECONDS
from ..storage.partitions import Partition
from ..storage.store import Store
from .executor import WorkerLost

logger = logging.getLogger(__name__)

LEAST_OVERDUE = 2 * PATIENCE_SECONDS  # every partition may take this long, because the storage may be unavailable
PREFETCHED = 2  # partitions that are reserved for a worker in addition to the current one
SHARES = 1.5  # partitions are reserved only while `SHARES * (1 + PREFETCHED)` are left for each of the other workers
MAX_LOST_MACHINES = 10  # a partition is quarantined after this many machines were lost while they computed it
HOPELESS = 2  # a stage ends after this many times `max_tries` failures without any success
MOST_TRIES = 3  # a partition that fails on only one of several nodes is quarantined after `MOST_TRIES * max_tries`


class WorkQueue:
    """The partitions in the order in which workers get them.

    Args:
        weights: the expected cost of each partition; workers get the most expensive one first. Without weights, the
            cost is the number of images, and the order is that of `partitions`.
    """

    def __init__(self, partitions: Iterable[Partition], weights: Mapping[Partition, float] | None = None) -> None:
        self._weights = weights or {}
        self._pending = deque(sorted(partitions, key=self._weight, reverse=True) if weights else partitions)
        self._reserved: dict[Any, deque[Partition]] = {}  # worker -> the partitions that it gets next
        self._failed: set[Partition] = set()  # these are computed without prefetched ones
        self._slowest = 0.0  # the most seconds per unit of expected cost that a finished partition took

    def __len__(self) -> int:
        return len(self._pending) + sum(map(len, self._reserved.values()))

    def take(self, worker: Any, n_workers: int) -> tuple[Partition, ...]:
        """Return the next partition for `worker`, one of `n_workers`, and those that it gets afterwards; () at the end.

        If only partitions that are reserved for other workers are left, the worker gets one of these. A partition that
        has failed before is neither prefetched nor computed with prefetched ones.
        """
        reserved = self._reserved.setdefault(worker, deque())
        if waiting := reserved or self._pending:
            partition = waiting.popleft()
        elif longest := max(self._reserved.values(), key=len):
            partition = longest.pop()
        else:
            return ()
        if partition in self._failed:
            return (partition,)
        enough = SHARES * (n_workers - 1) * (1 + PREFETCHED)
        while len(reserved) < PREFETCHED and len(self._pending) > enough and self._pending[0] not in self._failed:
            reserved.append(self._pending.popleft())
        return partition, *reserved

    def release(self, worker: Any) -> None:
        """Queue the partitions that are reserved for `worker` again, before all others."""
        self._pending.extendleft(reversed(self._reserved.pop(worker, deque())))

    def put_back(self, partition: Partition, *, failed: bool) -> None:
        """Queue a partition again, after all others if it has failed, and before them otherwise."""
        if failed:
            self._failed.add(partition)
            self._pending.append(partition)
        else:
            self._pending.appendleft(partition)

    def finished(self, partition: Partition, seconds: float) -> None:
        """Record how long a partition took."""
        self._slowest = max(self._slowest, seconds / self._weight(partition))

    def seconds_allowed(self, partition: Partition, times: float, at_most: float) -> float:
        """Return how long a partition may take: `times` the duration expected from the slowest finished partition.

        The slowest one counts because a robust image costs 30 times as much as a broken one, so the mean would be too
        short for a partition of robust images only. Before any partition is finished, `at_most` seconds per image are
        expected. The result is at least `LEAST_OVERDUE`.
        """
        expected = self._slowest * self._weight(partition) or at_most * len(partition)
        return max(LEAST_OVERDUE, times * expected)

    def _weight(self, partition: Partition) -> float:
        return self._weights.get(partition, float(len(partition)))


class Places:
    """Consecutive failures of each place, which is a node or one GPU of a node."""

    MOST = 2  # after this many a place gets no more work until a worker succeeds there
    FIRST_SECONDS, LAST_SECONDS = 10.0, 300.0  # shortest and longest back-off

    def __init__(self) -> None:
        self._failures: dict[Any, list[Exception]] = {}

    def failed(self, place: Any, error: Exception) -> None:
        """Record a failure."""
        self._failures.setdefault(place, []).append(error)

    def succeeded(self, place: Any) -> None:
        """Record a success, after which the failures are counted from 0 again."""
        self._failures.pop(place, None)

    def is_bad(self, place: Any) -> bool:
        """Whether the place gets no more work because of its failures."""
        return len(self._failures.get(place, ())) >= self.MOST

    def back_off(self, place: Any) -> float:
        """Return the seconds to wait after the last failure, which double with each failure in a row."""
        n = len(self._failures.get(place, ()))
        return min(self.LAST_SECONDS, self.FIRST_SECONDS * 2 ** max(0, n - 1)) if n else 0.0

    def last_errors(self) -> Sequence[Exception]:
        """Return the last error of each place that has not succeeded since."""
        return [errors[-1] for errors in self._failures.values()]


def error_log(stage: str, partition: Partition) -> str:
    """Return the path of the log of a partition's last failure: `errors/attack-00004.txt`."""
    return f"errors/{stage.replace('/', '-')}-{partition.index:05d}.txt"


@dataclass
class Failures:
    """The failed tries of one stage's partitions, and the partitions that are quarantined."""

    store: Store
    stage: str
    max_tries: int
    any_done: bool = False  # whether any partition was finished
    # Partition -> the nodes on which its tries failed, with None for a lost machine.
    _nodes: dict[Partition, list[str | None]] = field(default_factory=dict)
    _quarantined: dict[Partition, str] = field(default_factory=dict)  # -> the reason as a sentence
    _last: tuple[Partition, str, Exception] | None = None  # the last failed try

    def tries(self, partition: Partition) -> int:
        """Return how many tries of the partition have failed, without lost machines."""
        return sum(node is not None for node in self._nodes.get(partition, ()))

    def failed(self, partition: Partition, error: Exception, node: str | None, n_nodes: int) -> bool:
        """Record a failed try; returns whether the partition may be tried again.

        A partition is quarantined after `max_tries` failures. If there are several nodes, two of them must have failed,
        so that one broken machine does not quarantine the partitions that it gets. Lost machines and failures of the
        storage do not count as tries.

        Args:
            node: the node on which it failed, one of `n_nodes`; None if that machine is lost.
        """
        if isinstance(error, StoreError):
            return True
        nodes = self._nodes.setdefault(partition, [])
        nodes.append(node)
        n_tries = self.tries(partition)
        if node is None:
            n_lost = len(nodes) - n_tries
            what, again = f"lost {n_lost} machines", n_lost < MAX_LOST_MACHINES
        else:
            believed = n_nodes < 2 or len({*nodes} - {None}) > 1 or n_tries >= MOST_TRIES * self.max_tries
            what, again = f"failed {n_tries} of {self.max_tries} tries", n_tries < self.max_tries or not believed
            logger.warning("%s %s, the last one on node %s: %s", partition, what, node, in_short(error))
        self._last = partition, what, error
        if not again:
            self._quarantine(*self._last)
        return again

    def raise_if_hopeless(self) -> None:
        """Raise PartitionFailed if nothing has succeeded in `HOPELESS * max_tries` tries."""
        n_tries = sum(map(self.tries, self._nodes))
        if self.any_done or self._last is None or n_tries < HOPELESS * self.max_tries:
            return
        if not self._quarantined:
            self._quarantine(*self._last)
        raise PartitionFailed(
            f"{self._sentences()}\nAll {n_tries} tries have failed, so the other partitions were not tried"
        )

    def raise_if_quarantined(self) -> None:
        """Raise PartitionFailed, which names each quarantined partition and the address of its log."""
        if self._quarantined:
            raise PartitionFailed(self._sentences())

    def _sentences(self) -> str:
        return "\n".join(self._quarantined[key] for key in sorted(self._quarantined, key=lambda part: part.start))

    def _quarantine(self, partition: Partition, what: str, error: Exception) -> None:
        died = "the worker died: " if isinstance(error, WorkerLost) else ""
        path, sentence = error_log(self.stage, partition), f"{partition} {what}: {died}{printable(in_short(error))}"
        self._quarantined[partition] = f"{sentence}. Log: {self.store.address(path)}"
        trace = "".join(traceback.format_exception(error))
        self.store.write(path, f"{self.stage} {sentence}\n{trace}\n".encode())


def in_short(error: Exception) -> str:
    """Return the first line of the message of a `WorkerLost`, or the class and the message of another error."""
    if isinstance(error, WorkerLost):
        return str(error).strip().partition("\n")[0] or "WorkerLost"
    return f"{type(error).__name__}: {error}"

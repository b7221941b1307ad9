"""A cluster that is not there: the pool's own queue, with a made clock in place of Ray."""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..distributed.schedule import Merge, Work, WorkQueue
from ..storage.partitions import Partition, split_images

PIECE_SECONDS = 0.2  # reading the images of a piece and writing its file
_PASSES_A_SECOND = 300
MERGE_SECONDS = 1.0  # reading the files of a partition's spans and writing its one


@dataclass(frozen=True)
class Outcome:
    """How a simulated stage ended."""

    makespan: float  # seconds until the last worker ends
    ideal: float  # seconds if the images could be poured over the workers
    n_pieces: int
    n_merges: int

    @property
    def excess(self) -> float:
        """Share of the ideal by which the makespan is longer."""
        return self.makespan / self.ideal - 1


def simulate(
    seconds: Sequence[float],
    speeds: Sequence[float],
    *,
    partition_size: int,
    smallest: int,
    weights: Mapping[Partition, float] | None = None,
) -> Outcome:
    """One stage over images that cost `seconds` each on a worker of speed 1; one worker for each of `speeds`."""
    queue = WorkQueue(split_images(len(seconds), partition_size), smallest=smallest, weights=weights)
    begun = list(itertools.accumulate(seconds, initial=0.0))
    free, tick = list(range(len(speeds))), itertools.count()
    running: list[tuple[float, int, int, Work]] = []  # ends at, order, worker, its work
    now, n_pieces, n_merges = 0.0, 0, 0
    while True:
        while free and (work := queue.take(len(speeds))) is not None:
            worker = free.pop()
            n_merges += isinstance(work, Merge)
            n_pieces += not isinstance(work, Merge)
            heapq.heappush(running, (now + _duration(work, begun) / speeds[worker], next(tick), worker, work))
        if not running:
            return Outcome(now, begun[-1] / sum(speeds), n_pieces, n_merges)
        now, _, worker, work = heapq.heappop(running)
        free.append(worker)
        if isinstance(work, Merge):
            queue.finished(work)
        else:
            passes = round(_PASSES_A_SECOND * (begun[work.stop] - begun[work.start]))
            spent = _duration(work, begun) / speeds[worker]
            queue.finished(work, seconds=spent, n_forward=passes, machine=str(worker))


def _duration(work: Work, begun: Sequence[float]) -> float:
    if isinstance(work, Merge):
        return MERGE_SECONDS
    return PIECE_SECONDS + begun[work.stop] - begun[work.start]

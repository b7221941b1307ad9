"""Who gets what next: laws of the queue, without Ray."""

import math
import random
from collections import Counter

import pytest

from mixednuts_dist.distributed.schedule import LEAST_OVERDUE, Merge, Work, WorkQueue
from mixednuts_dist.storage.partitions import Partition, Span, split_images, uncovered, whole_of, without_overlaps


def drain(queue: WorkQueue, n_workers: int, seed: int = 0) -> list[Work]:
    """All that a pool would hand out; up to `n_workers` pieces are out at a time and end in random order."""
    order, out, running = random.Random(seed), [], {}
    while True:
        for worker in range(n_workers):
            if worker not in running and (work := queue.take(n_workers, worker)) is not None:
                running[worker] = work
                out.append(work)
                queue.prefetch(n_workers, worker, work)
        if not running:
            return out
        queue.finished(running.pop(order.choice(sorted(running))))


@pytest.mark.parametrize("n_workers", [1, 3, 64])
@pytest.mark.parametrize(("n_images", "size"), [(1, 5), (1000, 100), (1000, 7), (53, 53)])
@pytest.mark.parametrize("smallest", [1, 8])
def test_every_image_goes_out_once_and_every_cut_partition_is_merged(
    n_workers: int, n_images: int, size: int, smallest: int
) -> None:
    partitions = split_images(n_images, size)
    queue = WorkQueue(partitions, smallest=smallest)
    assert queue.most_pieces() >= len(partitions)
    out = drain(queue, n_workers)
    pieces = [work for work in out if isinstance(work, Partition)]
    merges = [work for work in out if isinstance(work, Merge)]
    images = Counter(i for piece in pieces for i in range(piece.start, piece.stop))
    assert images == Counter(range(n_images))
    cut = {whole_of(piece) for piece in pieces if isinstance(piece, Span)}
    assert sorted(merge.whole.index for merge in merges) == sorted(whole.index for whole in cut)
    for merge in merges:
        assert uncovered(merge.whole, merge.spans) == []
        assert [span.start for span in merge.spans] == sorted(span.start for span in merge.spans)
        last = max(out.index(span) for span in merge.spans)
        assert out.index(merge) > last
    assert all(len(piece) >= smallest or piece.stop == whole_of(piece).stop for piece in pieces)
    assert not cut or size > 2 * smallest


def test_partitions_go_out_whole_at_first_and_the_pieces_shrink_towards_the_end() -> None:
    pieces = [
        work for work in drain(WorkQueue(split_images(10_000, 100), smallest=8), 8) if isinstance(work, Partition)
    ]
    sizes = [len(piece) for piece in pieces]
    assert sizes[:50] == [100] * 50
    assert max(sizes[-8:]) < 20
    assert not isinstance(pieces[0], Span)
    assert isinstance(pieces[-1], Span)


def test_a_single_worker_does_not_cut_for_nobody() -> None:
    """Its share is half of what is left: only the very last partitions are cut, into few pieces."""
    out = drain(WorkQueue(split_images(1000, 100), smallest=25), 1)
    assert sum(isinstance(work, Merge) for work in out) <= 2


def test_the_heaviest_partitions_go_first_and_light_ones_are_cut_later() -> None:
    partitions = split_images(40, 10)
    weights = dict(zip(partitions, [1.0, 100.0, 10.0, 50.0], strict=True))
    queue = WorkQueue(partitions, smallest=1, weights=weights)
    first = queue.take(1)
    assert whole_of(first) == partitions[1]
    assert len(first) == 10  # 1 / 1.5 of 161 is more than its 100
    order = [whole_of(work).index for work in drain(queue, 1) if isinstance(work, Partition)]
    assert list(dict.fromkeys(order)) == [3, 2, 0]


def test_what_failed_goes_out_again_after_everything_else() -> None:
    queue = WorkQueue(split_images(30, 10), smallest=10)
    first = queue.take(1)
    queue.put_back(first)
    assert [queue.take(1) for _ in range(4)] == [*split_images(30, 10)[1:], first, None]


def test_an_earlier_sessions_spans_are_not_handed_out_again() -> None:
    whole, other = split_images(20, 10)
    done = [Span(0, 2, 5, whole), Span(0, 8, 10, whole)]
    out = drain(WorkQueue([whole, other], smallest=10, finished_spans=done), 1)
    assert Span(0, 0, 2, whole) in out
    assert Span(0, 5, 8, whole) in out
    assert [len(work.spans) for work in out if isinstance(work, Merge)] == [4]
    all_done = WorkQueue([whole], smallest=1, finished_spans=[Span(0, 0, 5, whole), Span(0, 5, 10, whole)])
    assert [type(work) for work in drain(all_done, 2)] == [Merge]


def test_spans_of_two_drivers_that_overlap_leave_no_image_twice() -> None:
    whole = Partition(0, 0, 10)
    kept = without_overlaps([Span(0, 4, 9, whole), Span(0, 0, 6, whole), Span(0, 6, 10, whole)])
    assert [(span.start, span.stop) for span in kept] == [(0, 6), (6, 10)]


def test_spans_that_waste_an_accelerator_end_the_cutting() -> None:
    def n_spans(images_that_cost_the_same: int) -> int:
        queue, found = WorkQueue(split_images(2000, 100), smallest=2), 0
        while (work := queue.take(4)) is not None:
            n = len(work) if isinstance(work, Partition) else 0
            found += isinstance(work, Span)
            # A pass over a few images takes as long as one over this many: the accelerator waits for itself.
            queue.finished(work, seconds=float(max(n, images_that_cost_the_same)), n_forward=n)
        return found

    assert n_spans(50) < 0.75 * n_spans(0)


def test_what_a_piece_may_take_follows_from_the_slowest_finished_one() -> None:
    queue = WorkQueue(split_images(300, 100), smallest=100)
    first, second = queue.take(3), queue.take(3)
    assert first is not None and second is not None
    assert queue.seconds_allowed(second, 10) == math.inf
    queue.finished(first, seconds=1000, n_forward=1, machine="a")
    assert queue.seconds_allowed(second, 10) == 10_000
    assert queue.seconds_allowed(second, 0.001) == LEAST_OVERDUE


def test_an_overdue_piece_goes_out_again_last_and_only_while_it_is_not_written() -> None:
    queue = WorkQueue(split_images(300, 100), smallest=100)
    hung = queue.take(1)
    assert hung is not None
    queue.hand_out_again(hung)
    assert [queue.take(1), queue.take(1), queue.take(1), queue.take(1)][2:] == [hung, None]
    queue.hand_out_again(hung)
    queue.finished(hung)
    assert queue.take(1) is None


def test_a_worker_gets_what_was_reserved_for_it_while_there_is_more_for_the_others() -> None:
    queue = WorkQueue(split_images(300, 10), smallest=10)
    first, second = queue.take(2, "a"), queue.take(2, "b")
    reserved = queue.prefetch(2, "a", first)
    assert [piece.index for piece in reserved] == [2, 3]
    assert [queue.take(2, "b"), queue.take(2, "a"), queue.take(2, "a")] == [*split_images(300, 10)[4:5], *reserved]
    assert queue.prefetch(2, "a", Merge(reserved[0], ())) == ()
    queue.put_back(reserved[0])
    assert queue.prefetch(2, "a", reserved[0]) == ()  # it has failed: it is tried without company
    assert second is not None
    while (work := queue.take(2, "b")) is not None and work != reserved[0]:
        assert reserved[0] not in queue.prefetch(2, "b", work)


def test_pieces_reserved_for_others_go_out_last_and_those_of_a_lost_worker_come_back() -> None:
    queue = WorkQueue(split_images(100, 10), smallest=10)
    reserved = queue.prefetch(1, "slow", queue.take(1, "slow"))
    rest = []
    while (work := queue.take(1, "fast")) is not None:
        rest.append(work)
    assert [work.index for work in rest] == [3, 4, 5, 6, 7, 8, 9, 2, 1]  # type: ignore[union-attr]
    assert {work for work in rest if isinstance(work, Partition)} > set(reserved)
    queue = WorkQueue(split_images(100, 10), smallest=10)
    reserved = queue.prefetch(1, "lost", queue.take(1, "lost"))
    assert len(queue) == 9
    queue.release("lost")
    assert len(queue) == 9
    assert queue.take(1, "other") == reserved[0]
    queue.prefetch(1, "other", reserved[0])
    queue.stop()
    assert len(queue) == 0
    assert queue.take(1, "other") is None

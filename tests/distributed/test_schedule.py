"""Which partition goes out next: laws of the queue, without Ray."""

import random
from collections import Counter

import pytest

from mixednuts_dist.distributed.schedule import LEAST_OVERDUE, PREFETCHED, Places, WorkQueue
from mixednuts_dist.storage.partitions import Partition, partition_size_of, split_images


def drain(queue: WorkQueue, n_workers: int, seed: int = 0) -> list[Partition]:
    """List what a pool hands out to `n_workers` that finish in random order."""
    order, out, running = random.Random(seed), [], {}
    while True:
        for worker in range(n_workers):
            if worker not in running and (partition := queue.take(worker)) is not None:
                running[worker] = partition
                out.append(partition)
                queue.reserve(worker, n_workers, partition)
        if not running:
            return out
        queue.finished(running.pop(order.choice(sorted(running))), 1.0)


@pytest.mark.parametrize("n_workers", [1, 3, 64])
@pytest.mark.parametrize(("n_images", "size"), [(1, 1), (1, 5), (9, 3), (1000, 100), (1000, 7), (53, 53)])
def test_each_partition_and_image_goes_out_once(n_workers: int, n_images: int, size: int) -> None:
    partitions = split_images(n_images, size)
    assert Counter(drain(WorkQueue(partitions), n_workers)) == Counter(partitions)
    assert [part.index for part in partitions] == list(range(-(-n_images // size)))
    assert [i for part in partitions for i in range(part.start, part.stop)] == list(range(n_images))


@pytest.mark.parametrize(("n_images", "n_partitions"), [(1, 1), (60, 4), (512, 32), (513, 17), (5000, 157)])
def test_small_sets_have_several_partitions(n_images: int, n_partitions: int) -> None:
    assert len(split_images(n_images, partition_size_of(n_images, None))) == n_partitions
    assert partition_size_of(n_images, 7) == 7


def test_the_most_expensive_partitions_go_first() -> None:
    partitions = split_images(40, 10)
    weights = dict(zip(partitions, [1.0, 100.0, 10.0, 50.0], strict=True))
    assert [part.index for part in drain(WorkQueue(partitions, weights), 1)] == [1, 3, 2, 0]
    assert drain(WorkQueue(partitions), 1) == partitions


def test_a_failed_partition_goes_out_last_and_a_lost_one_first() -> None:
    first, second, third = split_images(30, 10)
    queue = WorkQueue([first, second, third])
    assert [queue.take(1), queue.take(1)] == [first, second]
    queue.put_back(first, failed=True)
    queue.put_back(second, failed=False)
    assert [queue.take(1) for _ in range(4)] == [second, third, first, None]


def test_the_time_allowed_follows_from_the_slowest_partition() -> None:
    first, second, _ = split_images(300, 100)
    queue = WorkQueue([first, second])
    assert queue.seconds_allowed(second, 10, at_most=3) == 3000
    queue.finished(first, 1000)
    assert queue.seconds_allowed(second, 10, at_most=3) == 10_000
    assert queue.seconds_allowed(second, 0.001, at_most=3) == LEAST_OVERDUE


def test_a_worker_gets_its_reserved_partitions_next() -> None:
    partitions = split_images(300, 10)
    queue = WorkQueue(partitions)
    first, second = queue.take("a"), queue.take("b")
    assert first and second
    assert queue.reserve("a", 2, first) == tuple(partitions[2 : 2 + PREFETCHED])
    assert [queue.take("b"), queue.take("a"), queue.take("a")] == [partitions[4], *partitions[2:4]]


def test_a_failed_partition_is_neither_prefetched_nor_prefetches() -> None:
    partitions = split_images(100, 10)
    queue = WorkQueue(partitions)
    bad = queue.take("a")
    assert bad
    queue.put_back(bad, failed=True)
    assert queue.reserve("a", 1, bad) == ()
    while (partition := queue.take("a")) is not None and partition != bad:
        assert bad not in queue.reserve("a", 1, partition)


def test_reserved_partitions_go_last_and_return_after_a_loss() -> None:
    partitions = split_images(100, 10)
    queue = WorkQueue(partitions)
    reserved = queue.reserve("slow", 1, partitions[0])
    rest = []
    while (partition := queue.take("fast")) is not None:
        rest.append(partition.index)
    assert rest == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    queue = WorkQueue(partitions)
    reserved = queue.reserve("lost", 1, partitions[0])
    queue.release("lost")
    assert len(queue) == 10
    assert queue.take("other") == reserved[0]


def test_queue_reserves_nothing_near_its_end() -> None:
    partitions = split_images(100, 10)
    assert WorkQueue(partitions).reserve("a", 8, partitions[0]) == ()
    assert len(WorkQueue(partitions).reserve("a", 1, partitions[0])) == PREFETCHED


def test_a_place_is_bad_after_two_failures_in_a_row() -> None:
    places = Places()
    places.failed("a", ValueError("first"))
    places.succeeded("a")
    places.failed("a", ValueError("second"))
    assert not places.is_bad("a")
    waits = []
    for _ in range(6):
        places.failed("a", ValueError("third"))
        waits.append(places.back_off("a"))
    assert places.is_bad("a") and not places.is_bad("b")
    assert [str(error) for error in places.last_errors()] == ["third"]
    assert waits == [20, 40, 80, 160, 300, 300]
    assert places.back_off("b") == 0

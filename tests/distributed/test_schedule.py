"""Which partition goes out next: laws of the queue, without Ray."""

import random
from collections import Counter

import pytest

from mixednuts_dist.distributed.schedule import LEAST_OVERDUE, PREFETCHED, Places, WorkQueue
from mixednuts_dist.storage.partitions import Partition, partition_size_of, split_images

MANY = 1000  # workers: none of them gets a reserved partition


def drain(queue: WorkQueue, n_workers: int, seed: int = 0) -> list[Partition]:
    """List what a pool hands out to `n_workers` that finish in random order."""
    order, out, running = random.Random(seed), [], {}
    while True:
        for worker in range(n_workers):
            if worker not in running and (taken := queue.take(worker, n_workers)):
                running[worker] = taken[0]
                out.append(taken[0])
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
    assert [queue.take(1, MANY), queue.take(1, MANY)] == [(first,), (second,)]
    queue.put_back(first, failed=True)
    queue.put_back(second, failed=False)
    assert [queue.take(1, MANY) for _ in range(4)] == [(second,), (third,), (first,), ()]


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
    assert queue.take("a", 2) == tuple(partitions[: 1 + PREFETCHED])
    assert queue.take("b", MANY) == (partitions[3],)
    assert queue.take("a", MANY) == tuple(partitions[1:3])
    assert queue.take("a", MANY) == (partitions[2],)


def test_a_failed_partition_is_neither_prefetched_nor_prefetches() -> None:
    partitions = split_images(100, 10)
    queue = WorkQueue(partitions)
    (bad,) = queue.take("a", MANY)
    queue.put_back(bad, failed=True)
    found = []
    while taken := queue.take("a", 1):
        found.append(taken[0])
        assert bad not in taken[1:]
        assert len(taken) == 1 or taken[0] != bad
    assert Counter(found) == Counter(partitions)


def test_reserved_partitions_go_last_and_return_after_a_loss() -> None:
    partitions = split_images(100, 10)
    queue = WorkQueue(partitions)
    first, *reserved = queue.take("slow", 1)
    rest = []
    while taken := queue.take("fast", MANY):
        rest.append(taken[0].index)
    assert first.index == 0
    assert rest == [3, 4, 5, 6, 7, 8, 9, 2, 1]
    queue = WorkQueue(partitions)
    first, *reserved = queue.take("lost", 1)
    queue.release("lost")
    assert len(queue) == 9
    assert queue.take("other", MANY) == (reserved[0],)


def test_queue_reserves_nothing_near_its_end() -> None:
    partitions = split_images(100, 10)
    assert WorkQueue(partitions).take("a", 8) == (partitions[0],)
    assert len(WorkQueue(partitions).take("a", 1)) == 1 + PREFETCHED


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

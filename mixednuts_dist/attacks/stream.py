"""Prefetching: one scheduler for many calls, whose free slots go to the groups of later calls."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .scheduler import Finished, Group, Scheduler

_logger = logging.getLogger(__name__)


class Stream:
    """Keep one scheduler busy across calls: each call finishes one group and fills idle slots with the next ones.

    Args:
        engine: the scheduler, which must have no other user.
        group: returns the group of a key; called once per key.
    """

    def __init__(self, engine: Scheduler, group: Callable[[Any], Group]) -> None:
        self.engine, self._group = engine, group
        self._outcomes = engine.run(self._groups())
        self._to_begin: deque[Any] = deque()  # keys whose groups the engine has not taken yet
        self._inside: set[Any] = set()  # keys whose groups it has taken and not returned
        self._done: dict[Any, Finished] = {}
        self._wanted: Any = None
        self._n_returned = 0  # images of the groups that it has returned

    @property
    def n_decided(self) -> int:
        """Decided images of groups that are not returned yet."""
        return self.engine.n_decided - self._n_returned

    @property
    def n_forward_begun(self) -> int:
        """Passes so far of images of groups that are not returned yet."""
        return self.engine.n_forward_in_flight + sum(finished.n_forward for finished in self._done.values())

    def finish(self, key: Any, prefetched: Sequence[Any] = ()) -> Finished:
        """Return the outcome of a key's group, and begin the `prefetched` groups, in order, as slots become free.

        If a prefetched group cannot be loaded, it is tried again when it is the key. After an error the stream is
        unusable.
        """
        self._wanted = key
        self._to_begin = deque(
            each for each in (key, *prefetched) if each not in self._inside and each not in self._done
        )
        while key not in self._done:
            finished = next(self._outcomes)
            self._inside.discard(finished.group.key)
            self._done[finished.group.key] = finished
        outcome = self._done.pop(key)
        self._n_returned += len(outcome.group.y)
        for each in set(self._done) - set(prefetched):  # another worker has them now
            self._n_returned += len(self._done.pop(each).group.y)
        return outcome

    def _groups(self) -> Iterator[Group | None]:
        while True:
            if not self._to_begin:
                yield None
                continue
            key = self._to_begin.popleft()
            try:
                group = replace(self._group(key), key=key)
            except Exception as error:
                if key == self._wanted:
                    raise
                _logger.info("%s is not prefetched: %s", key, error)
                continue
            self._inside.add(key)
            yield group

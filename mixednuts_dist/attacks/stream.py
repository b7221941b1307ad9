"""Prefetching: one scheduler for many calls, whose free slots go to the groups of later calls."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from .result import AttackResult
from .scheduler import Group, Scheduler

_logger = logging.getLogger(__name__)


class Stream:
    """Keep one scheduler busy across calls: each call finishes one group and fills idle slots with the next ones.

    Args:
        engine: the scheduler, which must have no other user.
        group: returns the group of a key; called once per key.
    """

    def __init__(self, engine: Scheduler, group: Callable[[Any], Group]) -> None:
        self.engine, self._group = engine, group
        self._inside: dict[Any, Group] = {}  # groups that the engine has taken and not finished, by key
        self._done: dict[Any, AttackResult] = {}

    @property
    def n_forward_begun(self) -> int:
        """Passes so far of images of groups that are not returned yet."""
        return self.engine.passes_in_flight()[0] + sum(result.n_forward for result in self._done.values())

    def finish(self, key: Any, prefetched: Sequence[Any] = ()) -> AttackResult:
        """Return the result of a key's group, and begin the `prefetched` groups, in order, as slots become free.

        If a prefetched group cannot be loaded, it is tried again when it is the key. After an error the stream is
        unusable.
        """
        to_begin = [each for each in (key, *prefetched) if each not in self._inside and each not in self._done]
        while key not in self._done:
            while to_begin and self.engine.has_room:
                self._begin(to_begin.pop(0), wanted=key)
            self.engine.step()
            for group, result in self.engine.finished():
                (own,) = (each for each, inside in self._inside.items() if inside is group)
                del self._inside[own]
                self._done[own] = result
        result = self._done.pop(key)
        self._done = {each: done for each, done in self._done.items() if each in prefetched}  # others went elsewhere
        return result

    def _begin(self, key: Any, wanted: Any) -> None:
        try:
            group = self._group(key)
        except Exception as error:
            if key == wanted:
                raise
            _logger.info("%s is not prefetched: %s", key, error)
            return
        self._inside[key] = group
        self.engine.admit(group)

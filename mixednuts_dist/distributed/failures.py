"""What went wrong with each piece of work: tries are counted, poison is set aside with its log.

A process that dies at a piece has used up one of its tries. A machine that is taken away has not: on spot machines that
is nobody's fault. But a piece that takes its machine down each time must end as well, so lost machines have a bound.
"""

import logging
from dataclasses import dataclass, field

from ..errors import PartitionFailed
from ..storage.partitions import Partition, whole_of
from ..storage.store import Store
from .schedule import Merge, Work

logger = logging.getLogger(__name__)

MAX_LOST_MACHINES = 10  # while it was at one piece, or waited to write it
HOPELESS = 3  # times the tries of a piece, all of them failed: then it is the run, not the piece


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
    """The record of one stage."""

    store: Store
    stage: str
    max_tries: int
    _records: dict[Work, _Record] = field(default_factory=dict)
    _poison: dict[Work, str] = field(default_factory=dict)  # -> what to tell
    _failed_on: set[str] = field(default_factory=set)  # machines
    _any_done: bool = False

    def failed(self, work: Work, reason: str, log: str, machine: str = "") -> bool:
        """One more try is used up; True where another one is left."""
        record = self._records.setdefault(work, _Record())
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

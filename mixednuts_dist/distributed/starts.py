"""The starts of a pool's workers: which have failed, and how long a stage waits for a worker."""

import time

from ..errors import ClusterError, MixedNutsError
from .executor import Executor, PoolSettings, WorkerLost
from .schedule import Places


class Starts:
    """Failed starts per node. They are fatal only while no worker has ever been ready."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings, self._nodes = settings, Places()
        self._due: list[float] = []  # when the replacements of failed starts may begin
        self._n_failed, self._any_ready, self._last_ready = 0, False, time.monotonic()

    def succeeded(self, node: str) -> None:
        """Note that a worker on this node is ready."""
        self._any_ready = True
        self._nodes.succeeded(node)

    def failed(self, node: str, error: Exception, n_others: int, any_answered: bool) -> None:
        """Note a failed start, whose replacement waits longer after each failure on the node.

        Args:
            n_others: the number of other workers.
            any_answered: whether one of them has reported where it runs.

        Raises:
            MixedNutsError: the worker's own, if no worker has ever been ready and none is likely to become ready.
            ClusterError: the same for any other error.
        """
        in_a_row, most = self._nodes.failed(node, error), self._settings.max_tries
        self._n_failed += 1
        hopeless = (
            self._n_failed >= most * self._settings.n_workers
            or (in_a_row >= most and not any_answered)
            or not (n_others or isinstance(error, WorkerLost))
        )
        if hopeless and not self._any_ready:
            if isinstance(error, MixedNutsError):
                raise error
            raise ClusterError(f"no worker could start in {self._n_failed} tries; the last one ended with: {error}")
        self._due.append(time.monotonic() + self._nodes.back_off(node))

    def n_delayed(self) -> int:
        """Return how many replacements wait for their back-off."""
        self._due = [due for due in self._due if due > time.monotonic()]
        return len(self._due)

    def require_ready(self, any_ready: bool, executor: Executor) -> None:
        """Raise ClusterError if no worker has been ready for `start_seconds`."""
        now, settings = time.monotonic(), self._settings
        if any_ready:
            self._last_ready = now
        elif now - self._last_ready > settings.start_seconds:
            where = "".join(f", {name} {value}" for name, value in settings.placement.items())
            raise ClusterError(
                f"no worker was ready for {settings.start_seconds:g} s: {settings.n_workers} were requested, each with "
                f"{settings.num_cpus:g} CPUs and {settings.num_gpus:g} GPUs{where}; {executor.room()}. Change "
                "compute.num_workers, num_cpus or num_gpus to what it has, or raise compute.start_seconds"
            )

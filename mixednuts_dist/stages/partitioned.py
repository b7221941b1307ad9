"""The one way to send a stage's task over the partitions of a run: what is done stays, the rest goes to the workers.

`Progress` is what the stages tell whoever watches; the terminal and the logs are somebody else's business.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ..attacks.budget import AttackBudget
from ..config import AttackConfig, EvaluateConfig
from ..distributed.cluster import LocalSession, RaySession, connected, pool_settings
from ..distributed.pool import LocalPool, Pool, PoolSettings
from ..distributed.schedule import WorkQueue, error_log
from ..distributed.tasks import Task, WorkerSpec
from ..register import load_extensions
from ..storage.manifest import ManifestWriter, set_damaged_aside
from ..storage.partitions import Partition
from ..storage.records import Receipt
from ..storage.spans import delete_spans, finished_spans
from ..storage.store import Store
from .runs import Run, finished_partitions, stage_clock

SMALLEST_SPAN = 4  # images, to begin with; the queue raises it where so few waste time


class Progress(Protocol):
    """Called by the stages, always from the driver's main thread."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        """`n_images` in all; `done` are the partitions that earlier runs have left finished."""

    def partition_done(self, receipt: Receipt) -> None:
        """One more partition, or one more span of one, is written."""

    def stage_finished(self, stage: str, message: str) -> None:
        """The stage is complete; `message` says in a line what came out or that there was nothing to do."""


@runtime_checkable
class WatchesWorkers(Protocol):
    """A `Progress` that also wants to know who is at work and how far, every few seconds."""

    def workers_seen(self, ready: int, asked: int) -> None:
        """`ready` of `asked` workers are there; the others wait for room on the cluster."""

    def images_decided(self, images: float) -> None:
        """Of the pieces that are not finished; an image counts by shares where it meets several attacks."""


class Silent:
    """Tells nobody."""

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        pass

    def partition_done(self, receipt: Receipt) -> None:
        pass

    def stage_finished(self, stage: str, message: str) -> None:
        pass


def run_partitions(
    opened: Run,
    task: Task,
    session: RaySession | None,
    progress: Progress,
    weights: Mapping[Partition, float] | None = None,
    smallest: int = SMALLEST_SPAN,
) -> None:
    """Hand the unfinished partitions of a task to the pool.

    `weights` are expected costs, where known: the heaviest partitions go first. `smallest` are the images of the
    smallest span into which a partition may be cut; one of no more than twice as many goes out whole.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    finished = finished_partitions(opened, task.stage, task.fingerprint)
    todo = [partition for partition in opened.partitions if partition not in finished]
    spans = finished_spans(opened.store, task.stage, todo, task.fingerprint)
    progress.stage_started(task.stage, opened.inputs.n_images, [*finished.values(), *spans.values()])
    manifest = ManifestWriter(opened.store, task.stage, task.fingerprint, finished)
    if not todo:
        manifest.flush()
        delete_spans(opened.store, task.stage)
        progress.stage_finished(task.stage, f"nothing to do: all {len(finished)} partitions are done")
        return
    set_damaged_aside(opened.store, task.stage, todo)
    _forget_errors(opened.store, task.stage, todo)
    with stage_clock(opened.store, task.stage), connected(session):
        pool, cut = _pool(opened, task, session)
        pool.on_receipt, pool.on_file = progress.partition_done, manifest.add
        queue = WorkQueue(todo, smallest=max(smallest, cut), weights=weights, finished_spans=list(spans))
        if isinstance(progress, WatchesWorkers):
            pool.on_look, pool.on_decided = progress.workers_seen, progress.images_decided
        try:
            pool.run(queue)
        finally:
            manifest.flush()
    delete_spans(opened.store, task.stage)
    progress.stage_finished(task.stage, f"{len(todo)} partitions computed, {len(finished)} were done already")


def _pool(opened: Run, task: Task, session: RaySession | None) -> tuple[Pool, int]:
    """Who does the work, and the images of the smallest spans that a partition is cut into for them."""
    compute, spec = opened.config.compute, worker_spec(opened)
    if isinstance(session, LocalSession):
        one = PoolSettings(1, compute.num_cpus, 0, compute.max_tries)
        return LocalPool(spec, task, one, worker=session.worker(spec)), opened.config.partition_size  # nothing is cut
    settings = pool_settings(
        compute.num_workers, compute.num_gpus, compute.num_cpus, compute.max_tries, compute.start_seconds
    )
    return Pool(spec, task, settings), SMALLEST_SPAN


def _forget_errors(store: Store, stage: str, todo: Sequence[Partition]) -> None:
    """A partition that is tried again loses the log of its last failure."""
    left = set(store.names("errors"))
    for path in (error_log(stage, partition) for partition in todo):
        if path.removeprefix("errors/") in left:
            store.delete(path)


def worker_spec(opened: Run) -> WorkerSpec:
    """What every worker of the run must know."""
    config = opened.config
    return WorkerSpec(
        store_uri=opened.store.uri,
        data_uri=config.data.uri,
        std_uri=config.std,
        rob_uri=config.rob,
        checksums=opened.inputs.checksums,
        threat=config.threat.threat_model(),
        seed=config.seed,
        ln_k=config.search.ln_k,
        batch_size=config.compute.batch_size,
        precision=config.precision,
        compile=config.compute.compile,
        n_threads=max(1, int(config.compute.num_cpus)),
        extensions=load_extensions(config.extensions),
    )


def budget_of(section: AttackConfig | EvaluateConfig) -> AttackBudget:
    """The passes that a section of the configuration allows an image."""
    return AttackBudget(
        section.n_iter, section.n_target_classes, section.n_queries, border_restarts=section.border_restarts
    )

"""The one way to send a stage's task over the partitions of a run: what is done stays, the rest goes to the workers."""

from collections.abc import Mapping, Sequence

from ..distributed.executor import Executor, executing
from ..distributed.pool import Pool
from ..distributed.schedule import WorkQueue, error_log
from ..distributed.tasks import Task
from ..distributed.worker_spec import WorkerSpec
from ..register import load_extensions
from ..storage.manifest import ManifestWriter, set_damaged_aside
from ..storage.partitions import Partition
from ..storage.records import Receipt
from ..storage.spans import delete_spans, finished_spans
from ..storage.store import Store
from .early_stop import EarlyStop
from .progress import Progress, WatchesWorkers
from .runs import Run, finished_partitions, record_devices, stage_clock

SMALLEST_SPAN = 4  # images, to begin with; the queue raises it where so few waste time


def run_partitions(
    opened: Run,
    task: Task,
    executor: Executor | None,
    progress: Progress,
    weights: Mapping[Partition, float] | None = None,
    smallest: int = SMALLEST_SPAN,
    early_stop: EarlyStop | None = None,
) -> None:
    """Hand the unfinished partitions of a task to the pool.

    `weights` are expected costs, where known: the heaviest partitions go first. `smallest` are the images of the
    smallest span into which a partition may be cut; one of no more than twice as many goes out whole. With
    `early_stop` they go in its order, until it has seen enough.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    finished = finished_partitions(opened, task.stage, task.fingerprint)
    todo = [partition for partition in opened.partitions if partition not in finished]
    spans = finished_spans(opened.store, task.stage, todo, task.fingerprint)
    progress.stage_started(task.stage, opened.inputs.n_images, [*finished.values(), *spans.values()])
    manifest = ManifestWriter(opened.store, task.stage, task.fingerprint, finished)
    if early_stop:
        todo = sorted(todo, key=early_stop.place)
    if not todo or (early_stop and early_stop.enough(finished.values())):
        manifest.flush()
        delete_spans(opened.store, task.stage)
        done = (
            early_stop.sentence() if early_stop and todo else f"{len(finished)} of {len(finished)} partitions are done"
        )
        progress.stage_finished(task.stage, f"nothing to do: {done}")
        return
    set_damaged_aside(opened.store, task.stage, todo)
    _forget_errors(opened.store, task.stage, todo)
    computed: list[Receipt] = []
    with stage_clock(opened.store, task.stage), executing(executor, opened.config.compute) as used:
        pool = Pool(worker_spec(opened), task, used.workers(opened.config.compute), used)
        queue = WorkQueue(
            todo, smallest=smallest, weights=weights, finished_spans=list(spans),
            in_order=early_stop is not None,
        )  # fmt: skip

        def written(receipt: Receipt) -> None:
            manifest.add(receipt)
            computed.append(receipt)
            if early_stop and early_stop.enough([receipt]):
                queue.stop()

        pool.on_receipt, pool.on_file = progress.partition_done, written
        if isinstance(progress, WatchesWorkers):
            pool.on_look, pool.on_decided = progress.workers_seen, progress.images_decided
        try:
            pool.run(queue)
        finally:
            manifest.flush()
        record_devices(opened, [*finished.values(), *computed])
    delete_spans(opened.store, task.stage)
    done = f"{len(computed)} partition{'s' * (len(computed) != 1)} computed"
    if finished:
        done += f", {len(finished)} {'was' if len(finished) == 1 else 'were'} done already"
    progress.stage_finished(task.stage, f"{done}; {early_stop.sentence()}" if early_stop else done)


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
        n_classes=opened.inputs.n_classes,
        extensions=load_extensions(config.extensions),
    )

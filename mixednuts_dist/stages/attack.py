"""The attack stage: the margins that everything else reads, one partition a task."""

from collections.abc import Mapping

from ..config import RunConfig
from ..distributed.cluster import RaySession, connected, pool_settings
from ..distributed.pool import Pool
from ..distributed.schedule import WorkQueue
from ..distributed.tasks import AttackTask, EvaluateTask, WorkerSpec
from ..storage.partitions import Partition
from ..storage.spans import delete_spans, finished_spans
from ..storage.store import Store
from .adoption import adopt_attack
from .progress import Progress, Silent, WatchesWorkers
from .runs import Run, finished_partitions, open_run, stage_clock

SMALLEST_SPAN = 4  # images, to begin with; the queue raises it where so few waste time


def run(config: RunConfig, *, session: RaySession | None = None, progress: Progress | None = None) -> Run:
    """MMAA on every image that is not yet attacked; returns the opened run.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    opened = open_run(config)
    complete(opened, session, progress or Silent())
    return opened


def complete(opened: Run, session: RaySession | None, progress: Progress) -> None:
    """The stage on an opened run; errors as in `run`."""
    adopt_attack(opened)
    run_partitions(opened, attack_task(opened), session, progress)


def attack_task(opened: Run) -> AttackTask:
    """What the configuration asks of each partition."""
    attack = opened.config.attack
    return AttackTask(
        opened.attack_fingerprint,
        attack.n_iter,
        attack.n_target_classes,
        attack.stop_when_broken,
        attack.border_restarts,
        method=attack.method,
        n_queries=attack.n_queries,
    )


def run_partitions(
    opened: Run,
    task: AttackTask | EvaluateTask,
    session: RaySession | None,
    progress: Progress,
    weights: Mapping[Partition, float] | None = None,
) -> None:
    """Hand the unfinished partitions of a stage to the pool; shared by the attack and evaluate stages.

    `weights` are expected costs, where known: the heaviest partitions go first.
    """
    finished = finished_partitions(opened, task.stage, task.fingerprint)
    todo = [partition for partition in opened.partitions if partition not in finished]
    spans = finished_spans(opened.store, task.stage, todo, task.fingerprint)
    progress.stage_started(task.stage, opened.inputs.n_images, [*finished.values(), *spans.values()])
    if not todo:
        delete_spans(opened.store, task.stage)
        progress.stage_finished(task.stage, f"nothing to do: all {len(finished)} partitions are done")
        return
    compute = opened.config.compute
    _forget_errors(opened.store, todo)
    with stage_clock(opened.store, task.stage), connected(session):
        settings = pool_settings(compute.num_workers, compute.num_gpus, compute.num_cpus, compute.max_tries)
        queue = WorkQueue(todo, smallest=SMALLEST_SPAN, weights=weights, finished_spans=list(spans))
        pool = Pool(worker_spec(opened), task, settings, progress.partition_done)
        if isinstance(progress, WatchesWorkers):
            pool.on_look = progress.workers_seen
        pool.run(queue)
    delete_spans(opened.store, task.stage)
    progress.stage_finished(task.stage, f"{len(todo)} partitions computed, {len(finished)} were done already")


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
    )


def _forget_errors(store: Store, todo: list[Partition]) -> None:
    """A partition that is tried again loses the log of its last failure."""
    logs = set(store.names("errors"))
    for partition in todo:
        name = f"{partition.index:05d}.txt"
        if name in logs:
            store.delete(f"errors/{name}")

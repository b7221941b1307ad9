"""The attack stage: the margins that everything else reads, one partition a task."""

from ..config import RunConfig
from ..data.partitions import Partition
from ..data.store import Store
from ..distributed.cluster import RaySession, connected, pool_settings
from ..distributed.pool import Pool
from ..distributed.worker import AttackTask, EvaluateTask, WorkerSpec
from .adoption import adopt_attack
from .progress import Progress, Silent
from .runs import Run, finished_partitions, open_run, stage_clock


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
    attack = opened.config.attack
    task = AttackTask(
        opened.attack_fingerprint,
        attack.n_iter,
        attack.n_target_classes,
        attack.stop_when_broken,
        attack.border_restarts,
    )
    adopt_attack(opened)
    run_partitions(opened, task, session, progress)


def run_partitions(
    opened: Run, task: AttackTask | EvaluateTask, session: RaySession | None, progress: Progress
) -> None:
    """Hand the unfinished partitions of a stage to the pool; shared by the attack and evaluate stages."""
    finished = finished_partitions(opened, task.stage, task.fingerprint)
    todo = [partition for partition in opened.partitions if partition not in finished]
    progress.stage_started(task.stage, opened.inputs.n_images, list(finished.values()))
    if not todo:
        progress.stage_finished(task.stage, f"nothing to do: all {len(finished)} partitions are done")
        return
    compute = opened.config.compute
    _forget_errors(opened.store, todo)
    with stage_clock(opened.store, task.stage), connected(session):
        settings = pool_settings(compute.num_workers, compute.num_gpus, compute.num_cpus, compute.max_tries)
        Pool(_worker_spec(opened), task, settings, progress.partition_done).run(todo)
    progress.stage_finished(task.stage, f"{len(todo)} partitions computed, {len(finished)} were done already")


def _worker_spec(opened: Run) -> WorkerSpec:
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
        n_threads=max(1, int(config.compute.num_cpus)),
    )


def _forget_errors(store: Store, todo: list[Partition]) -> None:
    """A partition that is tried again loses the log of its last failure."""
    logs = set(store.names("errors"))
    for partition in todo:
        name = f"{partition.index:05d}.txt"
        if name in logs:
            store.delete(f"errors/{name}")

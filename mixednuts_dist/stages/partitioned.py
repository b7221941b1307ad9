"""Run the task of a stage on all unfinished partitions of a run."""

from collections.abc import Mapping
from pathlib import Path

from ..config.register import load_extensions
from ..config.run_config import RUNS
from ..distributed.executor import Executor, executing
from ..distributed.pool import Pool
from ..distributed.schedule import WorkQueue, error_log
from ..distributed.tasks import Task
from ..distributed.worker_spec import WorkerSpec
from ..storage.index import IndexWriter
from ..storage.partitions import Partition
from ..storage.records import PartitionSummary
from .driver_notes import record_current_stage, stage_clock
from .progress import RunProgress
from .runs import Run, finished_partitions


def run_partitions(
    opened: Run,
    task: Task,
    executor: Executor | None,
    progress: RunProgress,
    weights: Mapping[Partition, float] | None = None,
    label: str = "",
) -> None:
    """Have workers compute the unfinished partitions of a task.

    Args:
        weights: expected cost per partition; the most expensive partitions start first.
        label: the name of the stage in the progress; by default that of the task.

    Raises:
        PartitionFailed: if partitions fail repeatedly; all others are finished first.
    """
    name, finished = label or task.stage, finished_partitions(opened, task.stage, task.content_hash)
    todo, n = [partition for partition in opened.partitions if partition not in finished], len(finished)
    progress.stage_started(name, opened.n_images, [*finished.values()])
    index = IndexWriter(opened.rows, task.stage, task.content_hash, finished)
    if not todo:
        index.flush()
        progress.stage_finished(name, f"nothing to do: {n} of {n} partitions are done")
        return
    logs = {f"errors/{log}" for log in opened.store.names("errors")}  # written by earlier commands
    for log in logs & {error_log(task.stage, partition) for partition in todo}:
        opened.store.delete(log)
    record_current_stage(opened.store, task.stage, task.content_hash)
    with stage_clock(opened.store, task.stage), executing(executor, opened.config.compute) as used:
        pool = Pool(worker_spec(opened), task, used.workers(opened.config.compute), used)

        def count(summary: PartitionSummary) -> None:
            """Add a partition to the metrics that the pool exports."""
            n_images, n_broken = summary.n_images, summary.n_images - summary.robust
            pool.counts.update(images=n_images, broken=n_broken, forward_passes=summary.n_forward)

        def written(summary: PartitionSummary) -> None:
            index.add(summary)
            count(summary)
            progress.partition_done(summary)

        pool.on_summary, pool.on_look = written, progress.workers_seen
        for summary in finished.values():
            count(summary)
        try:
            pool.run(WorkQueue(todo, weights))
        finally:
            index.flush()
    before = f", {n} {'was' if n == 1 else 'were'} done already" if n else ""
    progress.stage_finished(name, f"{len(todo)} partition{'s' * (len(todo) > 1)} computed{before}")


def worker_spec(opened: Run) -> WorkerSpec:
    """Return the facts about the run that every worker needs."""
    config = opened.config
    return WorkerSpec(
        store_uri=opened.rows.uri,
        run=f"{RUNS}/{opened.store.uri.rpartition('/')[2]}",  # a study changes the configuration, not the folder
        data=config.data.uri,
        classifiers=config.classifiers,
        checksums=opened.inputs.checksums,
        threat=config.threat.threat_model(),
        seed=config.seed,
        ln_k=config.search.ln_k,
        batch_size=config.compute.batch_size,
        precision=config.precision,
        compile=config.compute.compile,
        n_threads=max(1, int(config.compute.num_cpus)),
        random=config.evaluate.eot is not None,
        n_classes=opened.inputs.n_classes,
        working_folder=str(Path.cwd()),
        extensions=load_extensions(config.extensions),
    )

"""The one way to send a stage's task over the partitions of a run: what is done stays, the rest goes to the workers.

`Progress` is what the stages tell whoever watches; the terminal and the logs are somebody else's business.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from ..attacks.budget import AttackBudget
from ..config import AttackConfig, EvaluateConfig
from ..distributed.executor import Executor, executing
from ..distributed.schedule import WorkQueue, error_log
from ..distributed.tasks import Task, WorkerSpec
from ..register import load_extensions
from ..selection.sequential import ConfidenceSequence
from ..storage.manifest import ManifestWriter, set_damaged_aside
from ..storage.partitions import Partition
from ..storage.records import Receipt
from ..storage.spans import delete_spans, finished_spans
from ..storage.store import Store
from .runs import Run, finished_partitions, record_devices, stage_clock

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


class Screening:
    """Evaluating partitions in random order until robust accuracy is known well enough.

    The values of the confidence sequence are the partitions' shares of robust images. Partitions finish in another
    order than they were drawn in, robust ones later; counted are those before the first unfinished one, so that what an
    image costs does not decide whether it counts.

    Args:
        points: half the width of the interval that is enough, in percentage points.
    """

    def __init__(self, partitions: Sequence[Partition], seed: int, points: float) -> None:
        order = torch.randperm(len(partitions), generator=torch.Generator().manual_seed(seed)).tolist()
        self.order = [partitions[i] for i in order]
        self._places = {partition.index: place for place, partition in enumerate(self.order)}
        self._points, self._robust = points, dict[int, int]()  # place -> robust images
        self._size = max(map(len, partitions))
        self._scale = len(partitions) * self._size / sum(map(len, partitions))  # the last one may be shorter
        self._bounds = ConfidenceSequence(len(partitions))

    def place(self, partition: Partition) -> int:
        """When it was drawn."""
        return self._places[partition.index]

    def enough(self, receipts: Iterable[Receipt]) -> bool:
        """Take in finished partitions; whether robust accuracy is known by now."""
        for receipt in receipts:
            self._robust[self._places[receipt.partition]] = receipt.robust
        while not self.known and self._bounds.n_seen in self._robust:
            self._bounds.add([self._robust[self._bounds.n_seen] / self._size])
        return self.known

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough."""
        low, high = self.interval
        return 100 * (high - low) <= 2 * self._points

    @property
    def interval(self) -> tuple[float, float]:
        """Of the robust accuracy on all images, right at all looks together with 95 % confidence."""
        low, high = self._bounds.interval
        return low * self._scale, high * self._scale

    @property
    def counted(self) -> list[Partition]:
        """The partitions that it rests on, in the order of their images."""
        return sorted(self.order[: self._bounds.n_seen], key=lambda partition: partition.start)

    def told(self) -> str:
        """The result in a sentence."""
        (low, high), counted, every = self.interval, sum(map(len, self.counted)), sum(map(len, self.order))
        return (
            f"robust accuracy on all {every:,} images is between {100 * low:.2f} and {100 * high:.2f} % (95 % "
            f"confidence over all looks), from {counted:,} of them in partitions drawn at random"
        )


def run_partitions(
    opened: Run,
    task: Task,
    session: Executor | None,
    progress: Progress,
    weights: Mapping[Partition, float] | None = None,
    smallest: int = SMALLEST_SPAN,
    screening: Screening | None = None,
) -> None:
    """Hand the unfinished partitions of a task to the pool.

    `weights` are expected costs, where known: the heaviest partitions go first. `smallest` are the images of the
    smallest span into which a partition may be cut; one of no more than twice as many goes out whole. With `screening`
    they go in its order, until it has seen enough.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    finished = finished_partitions(opened, task.stage, task.fingerprint)
    todo = [partition for partition in opened.partitions if partition not in finished]
    spans = finished_spans(opened.store, task.stage, todo, task.fingerprint)
    progress.stage_started(task.stage, opened.inputs.n_images, [*finished.values(), *spans.values()])
    manifest = ManifestWriter(opened.store, task.stage, task.fingerprint, finished)
    if screening:
        todo = sorted(todo, key=screening.place)
    if not todo or (screening and screening.enough(finished.values())):
        manifest.flush()
        delete_spans(opened.store, task.stage)
        done = screening.told() if screening and todo else f"{len(finished)} of {len(finished)} partitions are done"
        progress.stage_finished(task.stage, f"nothing to do: {done}")
        return
    set_damaged_aside(opened.store, task.stage, todo)
    _forget_errors(opened.store, task.stage, todo)
    computed: list[Receipt] = []
    with stage_clock(opened.store, task.stage), executing(session, opened.config.compute) as used:
        pool = used.pool(worker_spec(opened), task, opened.config.compute)
        cut = SMALLEST_SPAN if used.cuts_partitions else opened.config.partition_size
        queue = WorkQueue(
            todo, smallest=max(smallest, cut), weights=weights, finished_spans=list(spans),
            in_order=screening is not None,
        )  # fmt: skip

        def written(receipt: Receipt) -> None:
            manifest.add(receipt)
            computed.append(receipt)
            if screening and screening.enough([receipt]):
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
    progress.stage_finished(task.stage, f"{done}; {screening.told()}" if screening else done)


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

"""`mixednuts prepare`: images from anywhere -> balanced uint8 parts in a folder or a bucket.

Each part is a partition of the pool: workers write the parts in any order, on any node.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..config.compute_config import ComputeConfig
from ..config.run_config import digest
from ..config.threat import ThreatModel
from ..config.uris import DatasetSource
from ..errors import DatasetError, MixedNutsError
from ..images.arrays import ArrayImages
from ..images.datasets import Dataset, labels_checksum, open_dataset
from ..images.image_files import ImageFiles
from ..images.parquet_images import (
    MANIFEST,
    ImagePart,
    ImageRows,
    Manifest,
    balanced_order,
    encode_part,
    finished_part,
    open_parquet,
)
from ..storage.partitions import Partition, split_images
from ..storage.store import Store
from .executor import Executor, executing
from .pool import Pool
from .schedule import WorkQueue
from .tasks import Task
from .worker_spec import WorkerSpec

PART_SIZE = 100
_orders: dict[tuple[str, int, int], Sequence[int]] = {}  # the last one


@dataclass(frozen=True)
class PartDone:
    """A stored part, whose images all have `image_shape`, or the error of the worker that should have stored it."""

    part: ImagePart
    image_shape: tuple[int, int, int]
    was_there: bool
    seconds: float
    error: tuple[str, str] | None = None  # the class and the message, which no pickle changes


@dataclass(frozen=True, kw_only=True)
class PartTask(Task):
    """Write a part of the first `n_images` of the worker's dataset in balanced order, unless a whole file exists."""

    destination: str
    n_images: int
    seed: int

    def write(self, dataset: Dataset, partition: Partition) -> PartDone:
        """Return the part, or a MixedNutsError that it ended in as a value: the first one ends the command."""
        started, name = time.perf_counter(), partition.file_name
        try:
            store = Store(self.destination)
            rows = finished_part(store, name, self.content_hash)
            was_there = rows is not None
            if rows is None:
                order = _order(dataset, self.n_images, self.seed)
                rows = _read(dataset, order[partition.start : partition.stop])
                store.write(name, encode_part(rows, self.content_hash))
        except MixedNutsError as error:
            return PartDone(ImagePart(name, 0, 0, ""), (0, 0, 0), False, 0.0, (type(error).__name__, str(error)))
        part = ImagePart(name, partition.start, partition.stop, rows.sha256)
        return PartDone(part, rows.image_shape, was_there, time.perf_counter() - started)


def _order(dataset: Dataset, n_images: int, seed: int) -> Sequence[int]:
    """Return the order in which the parts hold the images, computed once per process."""
    key = labels_checksum(dataset), n_images, seed
    if key not in _orders:
        _orders.clear()
        _orders[key] = balanced_order(dataset.labels[:n_images], seed)
    return _orders[key]


def _read(dataset: Dataset, indices: Sequence[int]) -> ImageRows:
    """Return the images as the uint8 pixels that they were decoded from."""
    if not isinstance(dataset, ArrayImages | ImageFiles):
        raise DatasetError(f"{dataset.uri} is prepared already")
    images, labels = dataset.take(indices)
    pixels = images.mul(255).round().byte()
    if not bool((pixels.float().div(255) == images).all()):
        raise DatasetError(
            f"{dataset.uri}: its pixels are not multiples of 1/255, so uint8 cannot store them exactly; "
            "use it as data.uri without preparing it"
        )
    names = getattr(dataset, "names", None)
    called = tuple(names[i] if names else f"{dataset.uri.partition(':')[0]}/{i}" for i in indices)
    return ImageRows(pixels.numpy(), labels.numpy(), called)


def run(
    uri: str,
    destination: str,
    *,
    n: int | None = None,
    part_size: int = PART_SIZE,
    seed: int = 0,
    executor: Executor | None = None,
    on_part: Callable[[PartDone, int], None] | None = None,
) -> Manifest:
    """Write the first `n` images of `uri` (all by default) below `destination`; parts that are there are kept.

    `on_part` is called with each part that is done and the total number of images.

    Raises:
        DatasetError: if the source cannot be used, or `destination` holds other images; at the first part that cannot
            be read. Parts that are written stay.
        StoreError: at the first part that cannot be written.
        ClusterError, PartitionFailed: if no worker starts, or workers keep dying.
    """
    source = DatasetSource.of(uri)
    if source.scheme == "parquet":
        raise DatasetError(f"{uri} is prepared already; use it as data.uri")
    dataset = open_dataset(source)
    n_images = n or len(dataset)
    if n_images > len(dataset):
        raise DatasetError(f"n={n_images}, but {uri} has {len(dataset)} images")
    task = _task(dataset, destination, n_images, part_size, seed)
    _refuse_others(task)
    done: list[PartDone] = []

    def received(part: Any) -> None:
        if part.error is not None:
            kind, message = part.error
            raise getattr(errors, kind, DatasetError)(message)
        done.append(part)
        if on_part is not None:
            on_part(part, n_images)

    compute = ComputeConfig(num_gpus=0)
    with executing(executor, compute) as used:
        pool = Pool(_spec(source, dataset, task), task, used.workers(compute), used, received)
        pool.run(WorkQueue(split_images(n_images, part_size)))
    return _finish(uri, dataset, task, done)


def _task(dataset: Dataset, destination: str, n_images: int, part_size: int, seed: int) -> PartTask:
    shuffled = hashlib.sha256(json.dumps(_order(dataset, n_images, seed)).encode()).hexdigest()
    identity = {"source": dataset.checksum(n_images), "order": shuffled, "part_size": part_size}
    target = Store(destination).uri  # absolute: a worker has another working folder
    return PartTask(stage="prepare", content_hash=digest(identity), destination=target, n_images=n_images, seed=seed)


def _spec(uri: DatasetSource, dataset: Dataset, task: PartTask) -> WorkerSpec:
    """Return the specification of a worker with images and without classifiers."""
    return WorkerSpec(
        store_uri=task.destination, data=uri, classifiers={},
        checksums={"labels": labels_checksum(dataset)}, threat=ThreatModel("Linf", 1 / 255), seed=0, ln_k=None,
        batch_size=1, n_threads=1, working_folder=str(Path.cwd()),
    )  # fmt: skip


def _refuse_others(task: PartTask) -> None:
    """Refuse a destination that holds parts of another set of images."""
    store = Store(task.destination)
    if store.exists(MANIFEST):
        there = open_parquet(DatasetSource(f"parquet:{task.destination}")).manifest
        if there.content_hash != task.content_hash:
            raise DatasetError(
                f"{store.uri} already holds other images or another order ({len(there.labels)} images of "
                f"{there.source}, seed {there.seed}); choose another --to, or delete it"
            )


def _finish(uri: str, dataset: Dataset, task: PartTask, done: Sequence[PartDone]) -> Manifest:
    """Write the manifest, last of all: a set without one is not complete."""
    done = sorted(done, key=lambda part: part.part.start)
    shapes = {part.image_shape for part in done}
    if len(shapes) > 1:
        raise DatasetError(
            f"{dataset.uri}: images have different sizes, {sorted(shapes)}; "
            "bring them to one: ?preprocess=Res256Crop224"
        )
    manifest = Manifest(
        source=uri,
        content_hash=task.content_hash,
        seed=task.seed,
        image_shape=shapes.pop(),
        parts=tuple(part.part for part in done),
        labels=tuple(int(dataset.labels[i]) for i in _order(dataset, task.n_images, task.seed)),
    )
    Store(task.destination).write(MANIFEST, manifest.to_json())
    return manifest

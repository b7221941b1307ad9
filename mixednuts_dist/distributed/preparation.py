"""Write a dataset as balanced parts of uint8 images in a folder or a bucket (`mixednuts prepare`).

Each part is a partition of the pool, so workers write the parts in any order, on any node.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config.keys import ComputeConfig
from ..config.run_config import digest
from ..config.threat import ThreatModel
from ..config.uris import DatasetSource
from ..errors import DatasetError
from ..images.datasets import Dataset, labels_checksum, open_dataset
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
SEED = 0  # determines the order


@dataclass(frozen=True)
class PartDone:
    """A stored part, whose images all have `image_shape`."""

    part: ImagePart
    image_shape: tuple[int, int, int]
    was_there: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PartTask(Task):
    """Writes a part of the worker's dataset in balanced order, unless a whole file exists."""

    destination: str

    def write(self, dataset: Dataset, partition: Partition) -> PartDone:
        """Write the part in its own format; DatasetError if an image cannot be read."""
        started, name, store = time.perf_counter(), partition.file_name, Store(self.destination)
        there = finished_part(store, name, self.content_hash)
        rows = there or _read(dataset, balanced(dataset)[partition.start : partition.stop])
        if there is None:
            store.write(name, encode_part(rows, self.content_hash))
        part = ImagePart(name, partition.start, partition.stop, rows.sha256)
        return PartDone(part, rows.images.shape[1:], there is not None, time.perf_counter() - started)


def balanced(dataset: Dataset) -> Sequence[int]:
    """Return the order in which the parts hold the images."""
    return _order(dataset.labels.astype(np.int64).tobytes())


@functools.lru_cache(maxsize=1)
def _order(labels: bytes) -> Sequence[int]:
    return balanced_order(np.frombuffer(labels, np.int64), SEED)


def _read(dataset: Dataset, indices: Sequence[int]) -> ImageRows:
    """Return the images as the uint8 pixels that they were decoded from."""
    images = [dataset[i][0] for i in indices]
    pixels = [image.mul(255).round().byte() for image in images]
    if any(bool((exact.float().div(255) != image).any()) for exact, image in zip(pixels, images, strict=True)):
        raise DatasetError(
            f"{dataset.uri}: its pixels are not multiples of 1/255, so uint8 cannot store them exactly; "
            "use it as data.uri without preparing it"
        )
    _require_one_size(dataset, (tuple(image.shape) for image in images))
    names = getattr(dataset, "names", None)
    called = tuple(names[i] if names else f"{dataset.uri.partition(':')[0]}/{i}" for i in indices)
    return ImageRows(np.stack(pixels), dataset.labels[list(indices)], called)


def _require_one_size(dataset: Dataset, shapes: Iterable[tuple[int, ...]]) -> Any:
    """Return the only shape, or raise DatasetError."""
    found = sorted(set(shapes))
    if len(found) > 1:
        raise DatasetError(
            f"{dataset.uri}: images have different sizes, {found}; bring them to one: ?preprocess=Res256Crop224"
        )
    return found[0]


def run(
    uri: str,
    destination: str,
    *,
    executor: Executor | None = None,
    on_part: Callable[[PartDone, int], None] = lambda _part, _n_images: None,
) -> Manifest:
    """Write the images of `uri` below `destination`. Existing parts are kept.

    `on_part` is called with each part that is done and the total number of images. The manifest is written last, so a
    set of parts without a manifest is not complete.

    Raises:
        DatasetError: if the source cannot be used, or `destination` holds other images.
        PartitionFailed: naming the parts that cannot be read, after all others are written.
        StoreError, ClusterError: if no worker can write, or none starts.
    """
    source, store = DatasetSource.of(uri), Store(destination)
    if source.scheme == "parquet":
        raise DatasetError(f"{uri} is prepared already; use it as data.uri")
    dataset = open_dataset(source)
    task = PartTask(stage="prepare", content_hash=_content_hash(dataset, store), destination=store.uri)
    done: list[PartDone] = []

    def received(part: Any) -> None:
        done.append(part)
        on_part(part, len(dataset))

    checksums, folder = {"labels": labels_checksum(dataset)}, str(Path.cwd())
    spec = WorkerSpec(store.uri, source, ThreatModel("Linf", 1 / 255), checksums, working_folder=folder)
    with executing(executor, compute := ComputeConfig(num_gpus=0)) as used:
        Pool(spec, task, used.workers(compute), used, received).run(WorkQueue(split_images(len(dataset), PART_SIZE)))
    image_shape = _require_one_size(dataset, (part.image_shape for part in done))
    manifest = Manifest(
        source=uri,
        content_hash=task.content_hash,
        seed=SEED,
        image_shape=image_shape,
        parts=tuple(sorted((part.part for part in done), key=lambda part: part.start)),
        labels=tuple(int(dataset.labels[i]) for i in balanced(dataset)),
    )
    store.write(MANIFEST, manifest.model_dump_json().encode())
    return manifest


def _content_hash(dataset: Dataset, store: Store) -> str:
    """Return the hash of the images in their order; DatasetError if the destination holds parts of other images."""
    order = hashlib.sha256(json.dumps(balanced(dataset)).encode()).hexdigest()
    found = digest({"source": dataset.checksum(len(dataset)), "order": order, "part_size": PART_SIZE})
    if store.exists(MANIFEST):
        there = open_parquet(DatasetSource(f"parquet:{store.uri}")).manifest
        if there.content_hash != found:
            raise DatasetError(
                f"{store.uri} already holds other images ({len(there.labels)} images of {there.source}); choose "
                "another --to, or delete it"
            )
    return found

"""`mixednuts prepare`: images from anywhere -> balanced uint8 partitions in a folder or a bucket.

A Ray Data job writes each part by itself, in any order, on any node.
"""

import functools
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray.data
from ray.exceptions import RayError

from .. import errors
from ..config.compute_config import ComputeConfig
from ..config.run_config import digest
from ..config.uris import parse_uri
from ..errors import ClusterError, DatasetError, MixedNutsError
from ..images.arrays import ArrayImages
from ..images.datasets import Dataset, open_dataset
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
from ..storage.partitions import split_images
from ..storage.store import Store
from .executor import Executor, executing

_MAX_BLOCKS = 1000  # tasks that Ray Data makes of the job; a task writes one part after the other
_MAX_RETRIES = 3  # of a task whose worker or node was lost
PART_SIZE = 100


@dataclass(frozen=True)
class PartJob:
    """One part to be written: the images `indices` of `source`, in this order."""

    source: str
    destination: str
    fingerprint: str
    name: str
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class PartDone:
    """A written part; every image in it has `image_shape`."""

    part: ImagePart
    image_shape: tuple[int, int, int]
    was_there: bool


def write_parts(jobs: Sequence[PartJob]) -> Iterator[PartDone]:
    """Write the parts that are missing, and yield every part when it is there, in any order.

    Raises:
        DatasetError, StoreError: at the first part that cannot be read or written; parts that are written stay.
        ClusterError: where Ray lost a part's worker more than `_MAX_RETRIES` times.
    """
    try:
        for row in _plan(jobs).iter_rows():
            if row["error"]:
                raise getattr(errors, row["error"])(row["message"])
            part = json.loads(row["message"])
            yield PartDone(ImagePart(**part["part"]), tuple(part["image_shape"]), part["was_there"])
    except RayError as error:
        raise ClusterError(f"preparing the images failed: {str(error).strip().splitlines()[-1]}") from error


def _plan(jobs: Sequence[PartJob]) -> Any:
    """The lazy Ray Data job, with Ray's own bars and its warnings about its own defaults switched off."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        items = [asdict(job) for job in jobs]
        plan = ray.data.from_items(items, override_num_blocks=min(len(items), _MAX_BLOCKS))
        return plan.map(_written_or_error, max_retries=_MAX_RETRIES)


def _written_or_error(item: dict[str, Any]) -> dict[str, str]:
    """`_write`, with its error as a value, because an error that passes Ray Data loses its type."""
    try:
        written = _write(PartJob(**{**item, "indices": tuple(item["indices"])}))
    except MixedNutsError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": json.dumps(asdict(written))}


def _write(job: PartJob) -> PartDone:
    """Write a part atomically, unless a whole file of it is there."""
    store = Store(job.destination)
    rows = finished_part(store, job.name, job.fingerprint)
    was_there = rows is not None
    if rows is None:
        rows = _read(_source(job.source), job.indices)
        store.write(job.name, encode_part(rows, job.fingerprint))
    part = ImagePart(job.name, job.start, job.start + len(job.indices), rows.sha256)
    return PartDone(part, rows.image_shape, was_there)


@functools.lru_cache(maxsize=1)
def _source(uri: str) -> ArrayImages | ImageFiles:
    """The source, opened once a process."""
    dataset = open_dataset(uri)
    if not isinstance(dataset, ArrayImages | ImageFiles):
        raise DatasetError(f"{uri} is prepared already")
    return dataset


def _read(dataset: ArrayImages | ImageFiles, indices: Sequence[int]) -> ImageRows:
    """The images as the uint8 pixels that they were decoded from."""
    images, labels = dataset.take(indices)
    pixels = images.mul(255).round().byte()
    if not bool((pixels.float().div(255) == images).all()):
        raise DatasetError(
            f"{dataset.uri}: its pixels are no multiples of 1/255, so uint8 cannot store them exactly; "
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

    `on_part` is called with each part that is done and the number of images in all.

    Raises:
        DatasetError: where the source cannot be used, or `destination` holds other images.
    """
    if parse_uri(uri).scheme == "parquet":
        raise DatasetError(f"{uri} is prepared already; use it as data.uri")
    dataset = open_dataset(uri)
    n_images = n or len(dataset)
    if n_images > len(dataset):
        raise DatasetError(f"n={n_images}, but {uri} has {len(dataset)} images")
    jobs = _jobs(uri, dataset, destination, n_images, part_size, seed)
    _refuse_others(destination, jobs)
    done = []
    with executing(executor, ComputeConfig()) as used:
        used.start()
        for part in write_parts(jobs):
            done.append(part)
            if on_part is not None:
                on_part(part, n_images)
    return _finish(dataset, jobs, done, seed)


def _jobs(uri: str, dataset: Dataset, destination: str, n_images: int, part_size: int, seed: int) -> list[PartJob]:
    order = balanced_order(dataset.labels[:n_images], seed)
    shuffled = hashlib.sha256(json.dumps(order).encode()).hexdigest()
    identity = {"source": dataset.checksum(n_images), "order": shuffled, "part_size": part_size}
    fingerprint = digest(identity)
    target = Store(destination).uri  # absolute: a worker has another working folder
    return [
        PartJob(uri, target, fingerprint, part.file_name, part.start, tuple(order[part.start : part.stop]))
        for part in split_images(n_images, part_size)
    ]


def _refuse_others(destination: str, jobs: Sequence[PartJob]) -> None:
    """Refuse a destination that holds parts of another set of images."""
    store = Store(destination)
    if store.exists(MANIFEST):
        there = open_parquet(parse_uri(f"parquet:{destination}")).manifest
        if there.fingerprint != jobs[0].fingerprint:
            raise DatasetError(
                f"{store.uri} already holds other images or another order ({len(there.labels)} images of "
                f"{there.source}, seed {there.seed}); choose another --to, or delete it"
            )


def _finish(dataset: Dataset, jobs: Sequence[PartJob], done: Sequence[PartDone], seed: int) -> Manifest:
    """Write the manifest, last of all: a set without one is not complete."""
    done = sorted(done, key=lambda part: part.part.start)
    shapes = {part.image_shape for part in done}
    if len(shapes) > 1:
        raise DatasetError(
            f"{dataset.uri}: images have different sizes, {sorted(shapes)}; "
            "bring them to one: ?preprocess=Res256Crop224"
        )
    manifest = Manifest(
        source=jobs[0].source,
        fingerprint=jobs[0].fingerprint,
        seed=seed,
        image_shape=shapes.pop(),
        parts=tuple(part.part for part in done),
        labels=tuple(int(dataset.labels[i]) for job in jobs for i in job.indices),
    )
    Store(jobs[0].destination).write(MANIFEST, manifest.to_json())
    return manifest

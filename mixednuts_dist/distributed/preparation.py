"""Writing image partitions as a Ray Data job: each part by itself, in any order, on any node."""

import functools
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray.data
from ray.exceptions import RayError

from .. import errors
from ..errors import ClusterError, DatasetError, MixedNutsError
from ..images.arrays import ArrayImages
from ..images.datasets import open_dataset
from ..images.image_files import ImageFiles
from ..images.parquet_images import ImagePart, ImageRows, encode_part, finished_part
from ..storage.store import Store

_MAX_BLOCKS = 1000  # tasks that Ray Data makes of the job; a task writes one part after the other
_MAX_RETRIES = 3  # of a task whose worker or node was lost


@dataclass(frozen=True)
class PartJob:
    """One part to be written: these images of `source`, in this order."""

    source: str
    destination: str
    fingerprint: str
    name: str
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class PartDone:
    """A part that is in its place; `image_shape` is that of every image in it."""

    part: ImagePart
    image_shape: tuple[int, int, int]
    was_there: bool


def write_parts(jobs: Sequence[PartJob]) -> Iterator[PartDone]:
    """Write the parts that are not there yet, and yield every one as it is done, in any order.

    Raises:
        DatasetError, StoreError: at the first part that cannot be read or written; what is written stays.
        ClusterError: where Ray lost a part's worker again and again.
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
        return plan.map(_told, max_retries=_MAX_RETRIES)


def _told(item: dict[str, Any]) -> dict[str, str]:
    """`_write`, its errors as values: Ray Data would wrap them beyond recognition."""
    try:
        written = _write(PartJob(**{**item, "indices": tuple(item["indices"])}))
    except MixedNutsError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": json.dumps(asdict(written))}


def _write(job: PartJob) -> PartDone:
    """One part: take it as it is if it is whole, otherwise write it in one step."""
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
    """The images as the very uint8 pixels they were made from."""
    images, labels = dataset.take(indices)
    pixels = images.mul(255).round().byte()
    if not bool((pixels.float().div(255) == images).all()):
        raise DatasetError(
            f"{dataset.uri}: its pixels are no multiples of 1/255, and would not survive being stored as uint8; "
            "use it as it is"
        )
    names = getattr(dataset, "names", None)
    called = tuple(names[i] if names else f"{dataset.uri.partition(':')[0]}/{i}" for i in indices)
    return ImageRows(pixels.numpy(), labels.numpy(), called)

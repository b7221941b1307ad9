"""`mixednuts prepare`: images from anywhere -> balanced uint8 partitions in a folder or a bucket."""

import hashlib
import json
from collections.abc import Callable, Sequence

from ..config import digest
from ..distributed.cluster import RaySession, connected
from ..distributed.preparation import PartDone, PartJob, write_parts
from ..errors import DatasetError
from ..images.datasets import Dataset, open_dataset
from ..images.parquet_images import MANIFEST, Manifest, balanced_order, open_parquet
from ..storage.partitions import split_images
from ..storage.store import Store
from ..uris import parse_uri

PART_SIZE = 100


def run(
    uri: str,
    destination: str,
    *,
    n: int | None = None,
    part_size: int = PART_SIZE,
    seed: int = 0,
    session: RaySession | None = None,
    on_part: Callable[[PartDone, int], None] | None = None,
) -> Manifest:
    """Write the first `n` images of `uri` (all by default) below `destination`; parts that are there are kept.

    `on_part` is told of each part that is done and of how many images there are in all.

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
    with connected(session):
        for part in write_parts(jobs):
            done.append(part)
            if on_part is not None:
                on_part(part, n_images)
    return _finish(dataset, jobs, done, seed)


def _jobs(uri: str, dataset: Dataset, destination: str, n_images: int, part_size: int, seed: int) -> list[PartJob]:
    order = balanced_order(dataset.labels[:n_images], seed)
    identity = {"source": dataset.checksum(n_images), "order": _order_hash(order), "part_size": part_size}
    fingerprint = digest(identity)
    target = Store(destination).uri  # absolute: a worker has another working folder
    return [
        PartJob(uri, target, fingerprint, part.file_name, part.start, tuple(order[part.start : part.stop]))
        for part in split_images(n_images, part_size)
    ]


def _refuse_others(destination: str, jobs: Sequence[PartJob]) -> None:
    """Two sets in one folder would be a mixture of both."""
    store = Store(destination)
    if store.exists(MANIFEST):
        there = open_parquet(parse_uri(f"parquet:{destination}")).manifest
        if there.fingerprint != jobs[0].fingerprint:
            raise DatasetError(
                f"{store.uri} already holds other images or another order ({len(there.labels)} images of "
                f"{there.source}, seed {there.seed}); choose another --to, or delete it"
            )


def _finish(dataset: Dataset, jobs: Sequence[PartJob], done: Sequence[PartDone], seed: int) -> Manifest:
    """The manifest, written last: a set without one is not complete."""
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


def _order_hash(order: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()

"""Images that `mixednuts prepare` wrote (`parquet:URI`), in a folder or a bucket. A worker reads only its own images.

A part is a Parquet file of uint8 images, with one row (label, name, image) per image. `manifest.json` lists all labels
and all parts, with the sha256 of their rows, so that opening the dataset reads nothing else. This is layout version 1.
"""

import hashlib
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from ..config.register import DATASETS
from ..config.uris import DatasetSource
from ..errors import DatasetError, MissingArtifact, StoreError
from ..storage.store import Store
from .datasets import Dataset

MANIFEST = "manifest.json"
_METADATA = b"mixednuts_images"
logger = logging.getLogger(__name__)

_UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError, TypeError)


@dataclass(frozen=True)
class ImagePart:
    """Images `start` .. `stop - 1` of the dataset."""

    name: str  # file name next to the manifest
    start: int
    stop: int
    sha256: str  # content of the rows, independent of compression


class Manifest(BaseModel, frozen=True):
    """The content of `manifest.json`."""

    source: str  # the URI that was prepared
    content_hash: str  # identifies the source's bytes, the order, and the size of the parts
    seed: int  # determines the order
    image_shape: tuple[int, int, int]
    parts: tuple[ImagePart, ...]
    labels: tuple[int, ...]
    version: Literal[1] = 1


@dataclass(frozen=True)
class ImageRows:
    """The rows of one part."""

    images: np.ndarray[Any, Any]  # (B, C, H, W) uint8
    labels: np.ndarray[Any, Any]  # (B,) int64
    names: tuple[str, ...]  # what the source calls each image

    @cached_property
    def sha256(self) -> str:
        """Return the checksum of shape, names, labels and pixels."""
        sha = hashlib.sha256(json.dumps([list(self.images.shape), list(self.names)]).encode())
        sha.update(np.ascontiguousarray(self.labels, np.int64).tobytes())
        sha.update(np.ascontiguousarray(self.images).tobytes())
        return sha.hexdigest()


@dataclass
class ParquetImages(Dataset):
    """An opened prepared dataset."""

    uri: str
    store: Store
    manifest: Manifest

    def __post_init__(self) -> None:
        self.labels = np.array(self.manifest.labels, np.int64)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return images `start` .. `stop - 1` as float32 in [0, 1], and their labels.

        Raises:
            DatasetError: for a part that is missing, damaged, or not the one in the manifest.
        """
        pieces = [np.empty((0, *self.manifest.image_shape), np.uint8)]
        for part in self._parts(start, stop):
            pieces.append(read_part(self.store, part).images[max(start - part.start, 0) : stop - part.start])
        pixels = np.concatenate(pieces)
        return torch.from_numpy(pixels).float().div(255), torch.from_numpy(self.labels[start:stop].copy())

    def checksum(self, n: int) -> str:
        """Return the sha256 of the manifest's checksums of the first `n` images, which every read verifies."""
        parts = [part.sha256 for part in self._parts(0, n)]
        return hashlib.sha256(json.dumps([n, parts]).encode() + self.labels[:n].tobytes()).hexdigest()

    def _parts(self, start: int, stop: int) -> list[ImagePart]:
        return [part for part in self.manifest.parts if part.start < stop and start < part.stop]


@DATASETS("parquet", describes="the output of mixednuts prepare, in a folder or a bucket", order=7,
          forms=("parquet:URI",), target="place")  # fmt: skip
def open_parquet(uri: DatasetSource) -> ParquetImages:
    """Open a prepared dataset by its manifest.

    Raises:
        DatasetError: if the manifest is missing (the message has the command that creates one) or not readable.
    """
    address, store = uri.target, Store(uri.target)
    if not store.exists(MANIFEST):
        raise DatasetError(
            f"parquet:{address}: there is no {store.address(MANIFEST)}; make or complete the set with: "
            f"mixednuts prepare URI --to {address}"
        )
    try:
        manifest = Manifest.model_validate_json(store.read(MANIFEST))
    except ValidationError as error:
        wrong = error.errors()[0]
        reason = f"{'.'.join(map(str, wrong['loc']))} {wrong['msg']}".strip()
        raise DatasetError(f"parquet:{address}: {MANIFEST}: {reason}. Run mixednuts prepare again") from error
    return ParquetImages(f"parquet:{address}", store, manifest)


def encode_part(rows: ImageRows, content_hash: str) -> bytes:
    """Return the bytes of a part. `content_hash` identifies its preparation."""
    columns = {
        "label": pa.array(np.ascontiguousarray(rows.labels, np.int64)),
        "name": pa.array(rows.names, pa.string()),
        "image": pa.FixedSizeListArray.from_arrays(pa.array(rows.images.reshape(-1)), int(rows.images[0].size)),
    }
    about = {"shape": rows.images.shape[1:], "content_hash": content_hash, "sha256": rows.sha256}
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(about)})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_part(content: bytes) -> tuple[ImageRows, str]:
    """Return the rows and the content hash of a part. Damaged bytes raise errors of Arrow or Python."""
    table = pq.read_table(io.BytesIO(content))
    about = json.loads(table.schema.metadata[_METADATA])
    images = table.column("image").combine_chunks().flatten().to_numpy().reshape(-1, *about["shape"])
    rows = ImageRows(images, table.column("label").to_numpy(), tuple(table.column("name").to_pylist()))
    if rows.sha256 != about["sha256"]:
        raise ValueError("its pixels, labels or names are not those that were written")
    return rows, about["content_hash"]


def finished_part(store: Store, name: str, content_hash: str) -> ImageRows | None:
    """Return the rows of a part that an earlier `prepare` of the same images finished, or None."""
    if not store.exists(name):
        return None
    try:
        rows, found = decode_part(store.read(name))
    except _UNREADABLE as error:
        logger.warning("%s is damaged (%s); it is written again", store.address(name), error)
        return None
    return rows if found == content_hash else None


@lru_cache(maxsize=1)
def read_part(store: Store, part: ImagePart) -> ImageRows:
    """Read a part's rows and verify them against the manifest. The last part stays in memory.

    Raises:
        DatasetError: if the file is missing, damaged, or not the one in the manifest.
    """
    try:
        rows, _ = decode_part(store.read(part.name))
        if rows.sha256 != part.sha256:
            raise ValueError(f"it is not the part of this {MANIFEST}")
    except (*_UNREADABLE, StoreError, MissingArtifact) as error:
        raise DatasetError(
            f"{store.address(part.name)} (images {part.start}-{part.stop - 1}) is missing or damaged: {error}. The "
            "same mixednuts prepare command writes this part again and leaves the others"
        ) from error
    return rows


def balanced_order(labels: Iterable[int], seed: int) -> list[int]:
    """Return the indices 0 .. N-1, shuffled within each class, with the classes spread evenly.

    The r-th of the n images of a class gets the place (r + u) / n in [0, 1), with a constant u in [0, 1) per class, and
    the images are sorted by their places. Any w consecutive images then include n w / N images of that class, up to two
    more or less. The order depends only on `seed` and the labels.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[int(label)].append(index)
    places = []
    for label, indices in members.items():
        shift = _uniform(f"{seed} class {label}")
        shuffled = sorted(indices, key=lambda index: _uniform(f"{seed} image {index}"))
        places += [((rank + shift) / len(indices), index) for rank, index in enumerate(shuffled)]
    return [index for _, index in sorted(places)]


def _uniform(key: str) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on `key`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64

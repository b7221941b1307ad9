"""The index of a stage: `<stage>/<hash>/_index.json` holds the summary and checksum of each finished partition.

With the index, `status` reads one listing and one file instead of ten thousand footers. The footers remain
authoritative. An index entry counts only if the listing shows a file of the same size. `status` reads the footer of a
file that has no entry, and the next driver rebuilds a lost or damaged index from the footers.
"""

import hashlib
import io
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import MissingArtifact
from .damage import problem
from .partitions import Partition, rows_folder
from .records import PartitionSummary
from .store import Store, concurrently
from .tables import finished_summary, footer_of

logger = logging.getLogger(__name__)

INDEX_VERSION = 2
INDEX = "_index.json"  # readers of Parquet folders ignore names that begin with an underscore
_TUNE = "/search/tune/"  # the folder of Ray Tune in a run
_SECONDS_BETWEEN = 10.0  # at least, between two writes of the index
_SHARE = 0.02  # at most this share of a driver's time goes into writing the index


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written."""

    path: str  # relative to the store
    reason: str
    sha256: str  # checksum of the damaged bytes


def finished_files(
    store: Store, stage: str, partitions: Sequence[Partition], content_hash: str
) -> dict[Partition, PartitionSummary]:
    """Return the finished partitions and their summaries. A damaged file counts as missing, and nothing is written.

    Raises:
        NewerSchema: if a newer release has written a file.
        ContentHashMismatch: if a file belongs to another run.
    """
    folder = rows_folder(stage, content_hash)
    with ThreadPoolExecutor(1) as thread:
        listed = thread.submit(store.sizes, folder, {partition.stem for partition in partitions})
        entries = _entries(store, folder, content_hash)
        sizes = listed.result()

    def from_footer(partition: Partition) -> PartitionSummary | None:
        path = f"{folder}/{partition.file_name}"
        summary = finished_summary(store, path, content_hash)
        if summary is None or not summary.is_of(partition):
            logger.warning("%s is damaged; it will be computed again", store.address(path))
            return None
        return replace(summary, n_bytes=sizes[partition.file_name])

    found: dict[Partition, PartitionSummary | None] = {}
    for partition in (partition for partition in partitions if partition.file_name in sizes):
        entry = entries.get(partition.index)
        matches = entry and entry.is_of(partition) and entry.n_bytes == sizes[partition.file_name]
        found[partition] = entry if matches else None
    others = [partition for partition, entry in found.items() if entry is None]
    found |= zip(others, concurrently(from_footer, others), strict=True)
    return {partition: summary for partition, summary in found.items() if summary}


class IndexWriter:
    """Writes the index of a stage's rows; each write is atomic.

    Args:
        finished: the result of `finished_files`.
    """

    def __init__(
        self, store: Store, stage: str, content_hash: str, finished: Mapping[Partition, PartitionSummary]
    ) -> None:
        self._store, self._folder, self._content_hash = store, rows_folder(stage, content_hash), content_hash
        self._finished = {partition.index: summary for partition, summary in finished.items()}
        self._changed = bool(self._finished.keys() - _entries(store, self._folder, content_hash).keys())
        self._due = time.monotonic() + _SECONDS_BETWEEN

    def add(self, summary: PartitionSummary) -> None:
        """Add the file of a partition."""
        if summary.n_bytes:
            self._finished[summary.partition] = summary
            self._changed = True
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write the index if it has changed, with the entries that another driver has added."""
        if not self._changed:
            return
        started = time.monotonic()
        merged = _entries(self._store, self._folder, self._content_hash) | self._finished
        entries = [vars(summary) for _, summary in sorted(merged.items())]
        content = {"schema_version": INDEX_VERSION, "content_hash": self._content_hash, "entries": entries}
        text = json.dumps({**content, "digest": digest(content)}, separators=(",", ":"))
        self._store.write(f"{self._folder}/{INDEX}", text.encode())
        self._changed, now = False, time.monotonic()
        self._due = now + max(_SECONDS_BETWEEN, (now - started) / _SHARE)


def _entries(store: Store, folder: str, content_hash: str) -> dict[int, PartitionSummary]:
    """Return the entries of an index by partition; none if the index is missing, damaged or belongs to other rows."""
    try:
        content = read_json(store.read(f"{folder}/{INDEX}"))
        if content["schema_version"] != INDEX_VERSION or content.pop("digest") != digest(content):
            raise ValueError("it is not what this release has written")
        if content["content_hash"] != content_hash:
            return {}
        return {summary.partition: summary for summary in map(PartitionSummary.from_json, content["entries"])}
    except MissingArtifact:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is not used (%s): the footers are read instead", store.address(f"{folder}/{INDEX}"), error)
        return {}


def with_checksum(summary: PartitionSummary, content: bytes) -> PartitionSummary:
    """Return the summary of a file with the checksum and size of its bytes."""
    return replace(summary, sha256=hashlib.sha256(content).hexdigest(), n_bytes=len(content))


def verify(store: Store) -> tuple[list[Damage], int]:
    """Read every byte of every file; return the damaged files and the number of files.

    A file is whole if its sha256 is that of its index entry. Otherwise its own checksums decide, and a mismatch counts
    as damage unless the entry describes an earlier file of the same path. Ray Tune's own files are left out, because
    some are named .json and hold pickles.
    """

    def damage(path: str) -> Damage | None:
        content, entry = store.read(path), entries.get(path)
        sha256 = hashlib.sha256(content).hexdigest()
        if entry and entry.sha256 == sha256:
            return None
        reason = problem(path, content)
        if not reason and entry and footer_of(io.BytesIO(content)).summary == entry:
            reason = "its bytes are not those that were written"
        return Damage(path, reason, sha256) if reason else None

    paths = [path for path in store.all_files() if _TUNE not in f"/{path}"]
    folders = [path.removesuffix(f"/{INDEX}") for path in paths if path.endswith(f"/{INDEX}")]
    entries = {
        f"{folder}/{Partition(summary.partition, summary.start, summary.stop).file_name}": summary
        for folder in folders
        for summary in _entries(store, folder, folder.rpartition("/")[2]).values()
    }
    return [found for found in concurrently(damage, paths) if found], len(paths)


def repair(store: Store, damages: Iterable[Damage]) -> list[str]:
    """Quarantine damaged files, so that the next `mixednuts run` computes them again; returns their new paths."""

    def rename(damage: Damage) -> str | None:
        return store.set_aside(damage.path, unless=lambda content: hashlib.sha256(content).hexdigest() != damage.sha256)

    return [path for path in map(rename, damages) if path]

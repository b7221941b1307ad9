"""The index of a stage: `<stage>/<hash>/_index.json` holds the summary and the checksum of each finished partition.

With the index, `status` reads one listing and one file instead of ten thousand footers. The footers remain
authoritative. An index entry counts only if the listing shows a file of the same size. `status` reads the footer of a
file that has no entry, and the next driver rebuilds a lost or damaged index from the footers.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import MissingArtifact
from .damage import problem, set_aside_if_damaged
from .partitions import Partition, rows_folder
from .records import Receipt
from .store import Store, concurrently
from .tables import finished_receipt, footer_of

logger = logging.getLogger(__name__)

INDEX_VERSION = 2
INDEX = "_index.json"  # readers of Parquet folders ignore names that begin with an underscore
_SECONDS_BETWEEN = 10.0  # two writes of a session's file
_SHARE = 0.02  # of the time at most that a driver spends on writing it


@dataclass(frozen=True)
class Damage:
    """One file that is not what was written."""

    path: str  # in the run's folder
    reason: str
    sha256: str | None = None  # from the index


def finished_files(
    store: Store, stage: str, partitions: Sequence[Partition], fingerprint: str
) -> dict[Partition, Receipt]:
    """The partitions whose file is there, with their receipts; a damaged file counts as missing. Nothing is written.

    Raises:
        NewerSchema: where a newer release has written a file.
        FingerprintMismatch: where a file is of another run.
    """
    folder = rows_folder(stage, fingerprint)
    with ThreadPoolExecutor(1) as thread:
        listed = thread.submit(store.sizes, folder, {partition.stem for partition in partitions})
        known = {receipt.partition: receipt for receipt in _entries(store, folder, fingerprint)}
        sizes = listed.result()
    found: dict[Partition, Receipt] = {}
    unlisted: list[Partition] = []
    for partition in partitions:
        size, entry = sizes.get(partition.file_name), known.get(partition.index)
        if size is not None and entry is not None and entry.n_bytes == size and _is_of(entry, partition):
            found[partition] = entry
        elif size is not None:
            unlisted.append(partition)
    footers = concurrently(lambda part: _from_footer(store, folder, part, fingerprint, sizes), unlisted)
    found |= {partition: receipt for partition, receipt in zip(unlisted, footers, strict=True) if receipt}
    return {partition: found[partition] for partition in partitions if partition in found}


def set_damaged_aside(store: Store, folder: str, missing: Iterable[Partition]) -> list[str]:
    """For the stage that computes those partitions: damaged files in their places are renamed; returns the new paths.

    Another driver may have written a whole file since the partitions were found missing: that one is left alone.
    """
    there = store.sizes(folder)
    found = [partition for partition in missing if partition.file_name in there]
    aside = (set_aside_if_damaged(store, f"{folder}/{part.file_name}", partition=part) for part in found)
    return [path for path in aside if path]


class IndexWriter:
    """Write the index of a stage's rows; every change is one atomic write.

    Args:
        finished: what `finished_files` has found.
    """

    def __init__(self, store: Store, stage: str, fingerprint: str, finished: Mapping[Partition, Receipt]) -> None:
        self._store, self._folder, self._fingerprint = store, rows_folder(stage, fingerprint), fingerprint
        self._finished = {partition.index: receipt for partition, receipt in finished.items()}
        self._new: dict[int, Receipt] = {}
        known = {receipt.partition for receipt in _entries(store, self._folder, fingerprint)}
        self._changed = bool(self._finished.keys() - known)
        self._due = time.monotonic() + _SECONDS_BETWEEN

    def add(self, receipt: Receipt) -> None:
        """Add a partition's file."""
        if receipt.n_bytes:
            self._new[receipt.partition] = receipt
            self._changed = True
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write the index if there is anything new, with the entries that another driver has added."""
        if not self._changed:
            return
        started = time.monotonic()
        theirs = {receipt.partition: receipt for receipt in _entries(self._store, self._folder, self._fingerprint)}
        entries = [vars(receipt) for _, receipt in sorted((self._finished | theirs | self._new).items())]
        content = {"schema_version": INDEX_VERSION, "fingerprint": self._fingerprint, "entries": entries}
        text = json.dumps({**content, "digest": digest(content)}, separators=(",", ":"))
        self._store.write(f"{self._folder}/{INDEX}", text.encode())
        self._finished, self._new, self._changed = self._finished | self._new, {}, False
        now = time.monotonic()
        self._due = now + max(_SECONDS_BETWEEN, (now - started) / _SHARE)


def with_checksum(receipt: Receipt, content: bytes) -> Receipt:
    """The receipt of a file, with what the manifest says of its bytes."""
    return replace(receipt, sha256=hashlib.sha256(content).hexdigest(), n_bytes=len(content))


def verify(store: Store) -> tuple[list[Damage], int]:
    """Read every byte of every file; return the damaged ones and how many were read.

    A partition's file is compared with its sha256 in the index or, if there is none, with the checksums of its pages
    and footer. JSON files that hold a digest are compared with it.
    """
    paths = store.all_files()
    entries = _all_entries(store, paths)
    damages = concurrently(lambda path: _damage(path, store.read(path), entries.get(path)), paths)
    return [damage for damage in damages if damage is not None], len(paths)


def _damage(path: str, content: bytes, entry: Receipt | None) -> Damage | None:
    """Compare a file with its entry in the index, unless the entry is of an earlier file in its place."""
    sha256 = entry.sha256 if entry and _receipt_in(content) in (None, entry) else None
    why = problem(path, content, sha256 or None)
    return Damage(path, why, sha256) if why else None


def _receipt_in(content: bytes) -> Receipt | None:
    try:
        return footer_of(content).receipt
    except Exception:
        return None


def repair(store: Store, damages: Iterable[Damage]) -> list[str]:
    """Rename the damaged files, so that the next `mixednuts run` computes them again; return their new paths."""
    aside = (set_aside_if_damaged(store, damage.path, damage.sha256) for damage in damages)
    return [path for path in aside if path]


def _all_entries(store: Store, paths: Sequence[str]) -> dict[str, Receipt]:
    """Return path -> entry, from every index."""
    found: dict[str, Receipt] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == INDEX:
            for receipt in _entries(store, folder, folder.rpartition("/")[2]):
                partition = Partition(receipt.partition, receipt.start, receipt.stop)
                found[f"{folder}/{partition.file_name}"] = receipt
    return found


def _entries(store: Store, folder: str, fingerprint: str) -> list[Receipt]:
    """Return the entries of an index; none if it is missing, damaged or of other rows."""
    try:
        content = read_json(store.read(f"{folder}/{INDEX}"))
        if content["schema_version"] != INDEX_VERSION or content.pop("digest") != digest(content):
            raise ValueError("it is not what this release has written")
        if content["fingerprint"] != fingerprint:
            return []
        return [Receipt.from_json(entry) for entry in content["entries"]]
    except MissingArtifact:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is not used (%s): the footers are read instead", store.address(f"{folder}/{INDEX}"), error)
        return []


def _from_footer(
    store: Store, folder: str, partition: Partition, fingerprint: str, sizes: Mapping[str, int]
) -> Receipt | None:
    path = f"{folder}/{partition.file_name}"
    receipt = finished_receipt(store, path, fingerprint)
    if receipt is None or not _is_of(receipt, partition):
        logger.warning("%s is damaged; it will be computed again", store.address(path))
        return None
    return replace(receipt, n_bytes=sizes[partition.file_name])


def _is_of(receipt: Receipt, partition: Partition) -> bool:
    return (receipt.start, receipt.stop) == (partition.start, partition.stop)

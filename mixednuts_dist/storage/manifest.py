"""What is done: `<stage>/manifest/<session>.json` holds the receipt and checksum of every file of a stage.

With it `status` reads one listing and one file instead of ten thousand footers. A session (one driver at one stage)
writes one file, which it replaces as a whole every few seconds and which says everything that the session knows. A
manifest is an index, never the truth: an entry counts only where the listing shows a file of its size, a file without
an entry is asked for its footer, and a lost or damaged manifest is made again from the footers by the next session.
Whatever two drivers write, the union of their files is right.
"""

import hashlib
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import MissingArtifact
from .damage import problem, set_aside_if_damaged
from .partitions import Partition
from .records import Receipt
from .store import Store, concurrently
from .tables import finished_receipt

logger = logging.getLogger(__name__)

MANIFEST_VERSION = 1
FOLDER = "manifest"
CHECKSUMS = "checksums.json"  # of the other files of a folder
_SECONDS_BETWEEN = 10.0  # two writes of a session's file
_SHARE = 0.02  # of the time at most that a driver spends on writing it


@dataclass(frozen=True)
class Damage:
    """One file that is not what was written."""

    path: str  # in the run's folder
    reason: str
    sha256: str | None = None  # what it was held against, where the manifest or the folder says


def finished_files(
    store: Store, stage: str, partitions: Sequence[Partition], fingerprint: str
) -> dict[Partition, Receipt]:
    """The partitions whose file is there, with their receipts; a damaged file counts as missing. Nothing is written.

    Raises:
        NewerSchema: where a newer release has written a file.
        FingerprintMismatch: where a file is of another run.
    """
    with ThreadPoolExecutor(1) as thread:
        listed = thread.submit(store.sizes, stage, {partition.stem for partition in partitions})
        known = _known(store, stage, fingerprint, store.names(f"{stage}/{FOLDER}"))
        sizes = listed.result()
    found: dict[Partition, Receipt] = {}
    unlisted: list[Partition] = []
    for partition in partitions:
        size, entry = sizes.get(partition.file_name), known.get(partition.index)
        if size is not None and entry is not None and entry.n_bytes == size and _is_of(entry, partition):
            found[partition] = entry
        elif size is not None:
            unlisted.append(partition)
    footers = concurrently(lambda part: _from_footer(store, stage, part, fingerprint, sizes), unlisted)
    found |= {partition: receipt for partition, receipt in zip(unlisted, footers, strict=True) if receipt}
    return {partition: found[partition] for partition in partitions if partition in found}


def set_damaged_aside(store: Store, stage: str, missing: Iterable[Partition]) -> list[str]:
    """For the stage that computes those partitions: damaged files in their places are renamed; returns the new paths.

    Another driver may have written a whole file since the partitions were found missing: that one is left alone.
    """
    there = store.sizes(stage)
    found = [partition for partition in missing if partition.file_name in there]
    aside = (set_aside_if_damaged(store, f"{stage}/{part.file_name}", partition=part) for part in found)
    return [path for path in aside if path]


class ManifestWriter:
    """One session's file; every change of it is one atomic write.

    Args:
        finished: what `finished_files` has found, so that the file says everything and replaces those before it.
    """

    def __init__(self, store: Store, stage: str, fingerprint: str, finished: Mapping[Partition, Receipt]) -> None:
        self._store, self._stage, self._fingerprint = store, stage, fingerprint
        self._entries = {partition.index: receipt for partition, receipt in finished.items()}
        self._path = f"{stage}/{FOLDER}/{uuid.uuid4().hex[:12]}.json"
        names = store.names(f"{stage}/{FOLDER}")
        self._replaces = [f"{stage}/{FOLDER}/{name}" for name in names]
        self._changed = len(self._replaces) > 1 or {
            index: receipt.n_bytes for index, receipt in _known(store, stage, fingerprint, names).items()
        } != {index: receipt.n_bytes for index, receipt in self._entries.items()}
        self._due = time.monotonic() + _SECONDS_BETWEEN

    def add(self, receipt: Receipt) -> None:
        """Note a partition's file."""
        if receipt.n_bytes:
            self._entries[receipt.partition] = receipt
            self._changed = True
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write the file, if there is anything new, then delete those whose entries it has taken over."""
        if not self._changed:
            return
        started = time.monotonic()
        entries = [vars(receipt) for _, receipt in sorted(self._entries.items())]
        content = {"schema_version": MANIFEST_VERSION, "fingerprint": self._fingerprint, "entries": entries}
        text = json.dumps({**content, "digest": digest(content)}, separators=(",", ":"))
        self._store.write(self._path, text.encode())
        for path in self._replaces:
            if _readable(self._store, path):  # a newer release's is not ours to delete
                self._store.delete(path)
        self._replaces, self._changed = [], False
        now = time.monotonic()
        self._due = now + max(_SECONDS_BETWEEN, (now - started) / _SHARE)


def with_checksum(receipt: Receipt, content: bytes) -> Receipt:
    """The receipt of a file, with what the manifest says of its bytes."""
    return replace(receipt, sha256=hashlib.sha256(content).hexdigest(), n_bytes=len(content))


def write_with_checksums(store: Store, folder: str, files: Mapping[str, bytes]) -> None:
    """Write these files of a folder and then, for `verify`, their sha256 beside them.

    Sums of files that are being replaced are removed first: whatever interrupts this, none of them is wrong. JSON comes
    last, since it says that the others are there.
    """
    store.delete(f"{folder}/{CHECKSUMS}")
    last = [name for name in files if name.endswith(".json")]
    for names in (files.keys() - last, last):
        concurrently(lambda name: store.write(f"{folder}/{name}", files[name]), names)
    _write_sums(store, folder, files)


def restore_checksums(store: Store, folder: str, name: str) -> None:
    """Where the sums of a folder are gone, that of this file, unless the file tells that it is damaged."""
    if not store.exists(f"{folder}/{CHECKSUMS}"):
        content = store.read(f"{folder}/{name}")
        if problem(name, content) is None:
            _write_sums(store, folder, {name: content})


def _write_sums(store: Store, folder: str, files: Mapping[str, bytes]) -> None:
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    store.write(f"{folder}/{CHECKSUMS}", json.dumps({**sums, "digest": digest(sums)}, indent=1).encode())


def verify(store: Store) -> tuple[list[Damage], int]:
    """Read every byte of a run's files and hold it against its checksum; returns what is bad, and how many were read.

    A partition's file is held against the manifest's sha256, or, where that has none, against the checksums that its
    pages and footer carry; a small file against its folder's `checksums.json` or the digest that it holds itself.
    """
    paths = store.all_files()
    sums = _all_checksums(store, paths)
    damages = concurrently(lambda path: _damage(path, store.read(path), sums.get(path, ())), paths)
    return [damage for damage in damages if damage is not None], len(paths)


def _damage(path: str, content: bytes, sums: Collection[str]) -> Damage | None:
    """None where a file is what one of its writers has written: two drivers' rows are equal, their seconds are not."""
    held = hashlib.sha256(content).hexdigest()
    against = held if held in sums else next(iter(sums), None)
    why = problem(path, content, against)
    return Damage(path, why, against) if why else None


def repair(store: Store, damages: Iterable[Damage]) -> list[str]:
    """Set the damaged files aside, so that the next `mixednuts run` makes them again; returns their new paths."""
    aside = (set_aside_if_damaged(store, damage.path, damage.sha256) for damage in damages)
    return [path for path in aside if path]


def _all_checksums(store: Store, paths: Sequence[str]) -> dict[str, set[str]]:
    """Path -> sha256s, from the manifests of all stages and the `checksums.json` of all folders.

    Which of two sessions was later is not asked: their machines' clocks may differ.
    """
    sums: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder.endswith(f"/{FOLDER}") and name.endswith(".json"):
            stage = folder.removesuffix(f"/{FOLDER}")
            for receipt in _entries(store, path, None):
                file = f"{stage}/{Partition(receipt.partition, receipt.start, receipt.stop).file_name}"
                if receipt.sha256:
                    sums[file].add(receipt.sha256)
        elif name == CHECKSUMS and problem(path, store.read(path)) is None:
            told = read_json(store.read(path))
            for file in told.keys() - {"digest"}:
                sums[f"{folder}/{file}"].add(told[file])
    return sums


def _known(store: Store, stage: str, fingerprint: str, names: Sequence[str]) -> dict[int, Receipt]:
    """Partition -> receipt of these sessions; of two of one partition the later one, and one with a checksum.

    Two of one size with other checksums are left for the file to settle: which is later is a question of two clocks.
    """
    known: dict[int, Receipt] = {}
    disputed: set[int] = set()
    for entries in concurrently(lambda name: _entries(store, f"{stage}/{FOLDER}/{name}", fingerprint), names):
        for receipt in entries:
            before = known.get(receipt.partition)
            if before and before.n_bytes == receipt.n_bytes and before.sha256 != receipt.sha256:
                disputed.update({receipt.partition} if before.sha256 and receipt.sha256 else ())
            if before is None or (receipt.finished, bool(receipt.sha256)) > (before.finished, bool(before.sha256)):
                known[receipt.partition] = receipt
    return {index: receipt for index, receipt in known.items() if index not in disputed}


def _entries(store: Store, path: str, fingerprint: str | None) -> list[Receipt]:
    """The receipts of one session of this run; none of a file that is damaged, another run's or a newer release's."""
    try:
        content = read_json(store.read(path))
        if content["schema_version"] != MANIFEST_VERSION or content.pop("digest") != digest(content):
            raise ValueError("it is not what this release has written")
        if fingerprint is not None and content["fingerprint"] != fingerprint:
            return []
        return [Receipt.from_json(entry) for entry in content["entries"]]
    except MissingArtifact:  # another driver has just replaced it
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is not used (%s): the files are asked instead", store.address(path), error)
        return []


def _readable(store: Store, path: str) -> bool:
    try:
        return bool(read_json(store.read(path))["schema_version"] == MANIFEST_VERSION)
    except MissingArtifact:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # damaged: this session's file says all that it said


def _from_footer(
    store: Store, stage: str, partition: Partition, fingerprint: str, sizes: Mapping[str, int]
) -> Receipt | None:
    path = f"{stage}/{partition.file_name}"
    receipt = finished_receipt(store, path, fingerprint)
    if receipt is None or not _is_of(receipt, partition):
        logger.warning("%s is damaged; it will be computed again", store.address(path))
        return None
    return replace(receipt, n_bytes=sizes[partition.file_name])


def _is_of(receipt: Receipt, partition: Partition) -> bool:
    return (receipt.start, receipt.stop) == (partition.start, partition.stop)

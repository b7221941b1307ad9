"""The index of a stage: `<stage>/<hash>/_index.json` holds the summary and size of each finished partition.

With the index, `status` reads one listing and one file instead of ten thousand footers. The footers remain
authoritative. An index entry counts only if the listing shows a file of the same size. `status` reads the footer of a
file that has no entry, and the next driver rebuilds a lost or damaged index from the footers.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from ..errors import MissingArtifact
from .damage import read_signed_json, signed_json
from .partitions import Partition, rows_folder
from .records import PartitionSummary, from_plain
from .store import Store, concurrently
from .tables import SCHEMA_VERSION, finished_rows

logger = logging.getLogger(__name__)

INDEX = "_index.json"  # readers of Parquet folders ignore names that begin with an underscore
_SECONDS_BETWEEN = 60.0  # between two writes, each of which takes 1 s for a million images


def finished_files(
    store: Store, stage: str, partitions: Sequence[Partition], content_hash: str
) -> dict[Partition, PartitionSummary]:
    """Return the finished partitions and their summaries. A damaged file counts as missing, and nothing is written."""
    folder = rows_folder(stage, content_hash)
    sizes, entries = store.sizes(folder), _entries(store, folder)

    def from_footer(partition: Partition) -> PartitionSummary | None:
        path = f"{folder}/{partition.file_name}"
        summary = finished_rows(store, path, content_hash, partition)
        if summary is None:
            logger.warning("%s is damaged; it will be computed again", store.address(path))
        return summary

    there = [partition for partition in partitions if partition.file_name in sizes]
    found = {partition: entries.get(partition.index) for partition in there}
    others = [
        partition for partition, entry in found.items()
        if not (entry and entry.is_of(partition) and entry.n_bytes == sizes[partition.file_name])
    ]  # fmt: skip
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
        self._due = time.monotonic() + _SECONDS_BETWEEN

    def add(self, summary: PartitionSummary) -> None:
        """Add the summary of a finished partition, and write the index if the last write was a minute ago."""
        self._finished[summary.partition] = summary
        if time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write the index if it has changed, with the entries that another driver has added."""
        stored = _entries(self._store, self._folder)
        if (merged := stored | self._finished) != stored:
            entries = [vars(summary) for _, summary in sorted(merged.items())]
            content = {"schema_version": SCHEMA_VERSION, "content_hash": self._content_hash, "entries": entries}
            self._store.write(f"{self._folder}/{INDEX}", signed_json(content, separators=(",", ":")))
        self._due = time.monotonic() + _SECONDS_BETWEEN


def _entries(store: Store, folder: str) -> dict[int, PartitionSummary]:
    """Return partition -> entry of an index; empty if the index is missing or damaged."""
    try:
        content = read_signed_json(store.read(f"{folder}/{INDEX}"))
        return {summary.partition: summary for summary in from_plain(list[PartitionSummary], content["entries"])}
    except MissingArtifact:
        return {}
    except (ValueError, LookupError) as error:
        logger.warning("%s is not used (%s): the footers are read instead", store.address(f"{folder}/{INDEX}"), error)
        return {}

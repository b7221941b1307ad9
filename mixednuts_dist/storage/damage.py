"""Finds damaged files by their own checksums, and quarantines them.

Only the bytes that were read and found damaged are renamed. A whole file that another driver has written meanwhile
stays.
"""

import io

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import NewerSchema
from .partitions import Partition
from .records import PartitionSummary
from .store import Store
from .tables import finished_summary, footer_of, table_problem


def problem(path: str, content: bytes) -> str | None:
    """Describe the damage of a run's file, or return None. Other files than tables and JSON have no checksums."""
    if path.endswith(".parquet"):
        return _table_problem(content)
    if path.endswith(".json"):
        return _json_problem(content, must_be_signed=path.endswith("selected.json"))
    return None


def set_aside_if_damaged(store: Store, path: str, *, partition: Partition | None = None) -> str | None:
    """Quarantine a damaged file; returns its new path, or None if the file is whole or missing.

    Args:
        partition: the partition whose rows the file must hold; a file with other rows counts as damaged.
    """

    def is_good(content: bytes) -> bool:
        return problem(path, content) is None and (partition is None or _holds(content, partition))

    return store.set_aside(path, unless=is_good)


def finished_rows(store: Store, path: str, content_hash: str, partition: Partition) -> PartitionSummary | None:
    """Return the summary of a partition's file; None if it is missing, damaged or holds other rows.

    Raises:
        NewerSchema, ContentHashMismatch: as in `finished_summary`.
    """
    summary = finished_summary(store, path, content_hash)
    return summary if summary and summary.is_of(partition) else None


def create_whole(
    store: Store, path: str, content: bytes, content_hash: str, partition: Partition
) -> PartitionSummary | None:
    """Write a partition's file. If another driver has left a whole one, that file stays and its summary is returned.

    A damaged file of that name is quarantined.

    Raises:
        ContentHashMismatch: if a file of another run has that path.
    """
    while not store.create(path, content):
        if existing := finished_rows(store, path, content_hash, partition):
            return existing
        set_aside_if_damaged(store, path, partition=partition)
    return None


def _holds(content: bytes, partition: Partition) -> bool:
    try:
        return footer_of(io.BytesIO(content)).summary.is_of(partition)
    except (KeyError, TypeError):  # the file was not written by a stage
        return False


def _table_problem(content: bytes) -> str | None:
    try:
        return table_problem(content)
    except NewerSchema:
        return None  # only the release that wrote the file can check it


def _json_problem(content: bytes, must_be_signed: bool) -> str | None:
    try:
        values = read_json(content)
    except ValueError as error:
        return f"it is not JSON: {error}"
    if not isinstance(values, dict) or (must_be_signed and "digest" not in values):
        return "it is not a file that any release has written"
    return "its content has changed" if "digest" in values and values.pop("digest") != digest(values) else None

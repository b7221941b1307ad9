"""Whether a file's bytes are what was written and what a run can use; the only place from which one is set aside.

A file is renamed after the very bytes that are renamed were read and found damaged: what another driver has written
whole since somebody last looked stays where it is.
"""

import hashlib
import io

import pyarrow.parquet as pq

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import NewerSchema
from .partitions import Partition
from .records import Receipt
from .store import Store
from .tables import FOOTER, finished_receipt, footer_of, is_whole, unusable_column


def problem(path: str, content: bytes, sha256: str | None = None) -> str | None:
    """What is wrong with a file of a run, by its checksum or by what it says of itself; None where nothing is."""
    if sha256 is not None:
        return None if hashlib.sha256(content).hexdigest() == sha256 else "its bytes are not those that were written"
    if path.endswith(".parquet"):
        return _parquet_problem(content)
    if path.endswith(".json"):
        return _json_problem(content, must_be_signed=path.endswith("selected.json"))
    return None


def set_aside_if_damaged(
    store: Store, path: str, sha256: str | None = None, *, partition: Partition | None = None
) -> str | None:
    """Rename a damaged file; returns its new path, None where the file is whole or gone.

    Args:
        partition: whose rows the file must hold; another partition's are as good as damaged.
    """

    def is_whole_file(content: bytes) -> bool:
        return problem(path, content, sha256) is None and (partition is None or _holds(content, partition))

    return store.set_aside(path, unless=is_whole_file)


def create_whole(store: Store, path: str, content: bytes, fingerprint: str) -> Receipt | None:
    """Write a piece's file; where another driver has left a whole one, that one stays and its receipt is returned.

    Raises:
        FingerprintMismatch: where a file of another run lies there.
    """
    while not store.create(path, content):
        if there := finished_receipt(store, path, fingerprint):
            return there
        set_aside_if_damaged(store, path)
    return None


def _holds(content: bytes, partition: Partition) -> bool:
    try:
        receipt = footer_of(content).receipt
    except (KeyError, TypeError):  # a partition's file has a footer of ours
        return False
    return (receipt.start, receipt.stop) == (partition.start, partition.stop)


def _parquet_problem(content: bytes) -> str | None:
    try:
        if is_whole(content):
            return unusable_column(content)
        parquet = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        if FOOTER in (parquet.schema_arrow.metadata or {}):
            return "its pages or its footer are not those that were written"
        for _ in parquet.iter_batches():  # a table without our footer: the search's candidates
            pass
    except NewerSchema:
        return None  # for its own release to say
    except Exception as error:  # at damaged bytes pyarrow raises almost any of Python's errors
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _json_problem(content: bytes, must_be_signed: bool) -> str | None:
    try:
        values = read_json(content)
    except ValueError as error:
        return f"it is no JSON: {error}"
    if not isinstance(values, dict) or (must_be_signed and "digest" not in values):
        return "it is not what any release has written"
    return "its content has changed" if "digest" in values and values.pop("digest") != digest(values) else None

"""Files of spans: the parts of a partition that several workers have shared, until they become its one file."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from ..errors import MissingArtifact
from .damage import create_whole
from .manifest import with_checksum
from .partitions import SPANS, Partition, Span, without_overlaps
from .records import Receipt
from .store import Store, concurrently
from .tables import encode_table, finished_receipt, read_columns

_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)\.parquet")


def finished_spans(store: Store, stage: str, partitions: Sequence[Partition], fingerprint: str) -> dict[Span, Receipt]:
    """Whole files of spans of these partitions, no image in two of them; damaged files count as missing.

    Raises:
        FingerprintMismatch: where a file is of another run.
    """
    by_index = {partition.index: partition for partition in partitions}
    found: dict[Partition, dict[Span, Receipt]] = {}
    names = store.names(f"{stage}/{SPANS}") if partitions else ()
    spans = [span for name in names if (span := _parse(name, by_index))]
    receipts = concurrently(lambda span: finished_receipt(store, f"{stage}/{span.file_name}", fingerprint), spans)
    for span, receipt in zip(spans, receipts, strict=True):
        if receipt:
            found.setdefault(span.whole, {})[span] = receipt
    return {span: by_span[span] for by_span in found.values() for span in without_overlaps(by_span)}


def merge_spans(store: Store, stage: str, whole: Partition, spans: Sequence[Span], fingerprint: str) -> Receipt:
    """Write the partition's file from its spans' files, the same rows in the same order, and delete those.

    Another driver of the same run may have done it already; then its file is the one.

    Raises:
        MissingArtifact: where a span's file is gone and the partition's is not there either.
    """
    path = f"{stage}/{whole.file_name}"
    if there := finished_receipt(store, path, fingerprint):
        return there
    try:
        # Receipts first: they say of a cut file that it is damaged, in one line.
        receipts = concurrently(lambda span: _receipt(store, f"{stage}/{span.file_name}", fingerprint), spans)
        receipt = _added_up(whole, receipts)
        columns = read_columns(store, stage, spans, fingerprint, _column_names(store, f"{stage}/{spans[0].file_name}"))
    except MissingArtifact:
        if there := finished_receipt(store, path, fingerprint):  # merged by another driver a moment ago
            return there
        raise
    content = encode_table(columns, fingerprint, receipt)
    there = create_whole(store, path, content, fingerprint)
    concurrently(lambda span: store.delete(f"{stage}/{span.file_name}"), spans)
    return there or with_checksum(receipt, content)


def delete_spans(store: Store, stage: str) -> None:
    """Remove what is left of the spans of a complete stage."""
    concurrently(lambda name: store.delete(f"{stage}/{SPANS}/{name}"), store.names(f"{stage}/{SPANS}"))
    store.delete_empty_folder(f"{stage}/{SPANS}")


def _parse(name: str, by_index: dict[int, Partition]) -> Span | None:
    match = _NAME.fullmatch(name)
    if not match:
        return None
    index, start, stop = map(int, match.groups())
    whole = by_index.get(index)
    fits = whole is not None and whole.start <= start < stop <= whole.stop
    return Span(index, start, stop, whole) if whole and fits else None


def _column_names(store: Store, path: str) -> list[str]:
    with store.open(path) as file:
        names: list[str] = pq.ParquetFile(file).schema_arrow.names
    return names


def _receipt(store: Store, path: str, fingerprint: str) -> Receipt:
    receipt = finished_receipt(store, path, fingerprint)
    if receipt is None:
        raise MissingArtifact(f"{store.address(path)} is gone or damaged")
    return receipt


def _added_up(whole: Partition, receipts: Sequence[Receipt]) -> Receipt:
    changes: dict[str, Any] = {"start": whole.start, "stop": whole.stop}
    for name in ("clean_correct", "robust", "seconds", "joules", "n_forward", "n_backward"):
        changes[name] = sum(getattr(receipt, name) for receipt in receipts)
    changes["finished"] = max(receipt.finished for receipt in receipts)
    for name in ("node", "device", "precision"):
        changes[name] = ", ".join(sorted({getattr(receipt, name) for receipt in receipts}))
    for shape in ("rows", "float32_rows"):
        changes[shape] = min(getattr(receipt, shape) for receipt in receipts)
    changes["repeatable"] = all(receipt.repeatable for receipt in receipts)
    return replace(receipts[0], **changes)

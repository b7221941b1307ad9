"""Write and read the Parquet files of a run: the rows of the stages, one per image, and the candidates of a search.

The footer holds the summary of the partition, the sha256 of the bytes before it (`mixednuts`), and its own sha256
(`mixednuts.sha256`), computed with 64 zeros instead of this value. So the last bytes of a file are enough to verify its
footer, and the checksums of Parquet's pages verify columns that are read alone.

Shapes: B images of one partition, N of the run, K classes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import ContentHashMismatch, DamagedFile, MissingArtifact, reason_of
from .partitions import Partition, rows_among, rows_folder
from .records import AttackRecords, EvaluateRecords, PartitionSummary, from_plain
from .store import Store, concurrently

if TYPE_CHECKING:  # commands that only look at a run's footers do not import PyTorch
    from torch import Tensor

    from ..selection.selection import Selection

SCHEMA_VERSION = 7  # for other readers; `RESULTS_VERSION` is part of the content hash
SURVIVED = "survived_"  # column prefix, before the attack's name
FLAG = "flag_"  # column prefix, before the red flag's name
_METADATA, _SHA256, _ZEROS = b"mixednuts", b"mixednuts.sha256", b"0" * 64
_ROWS_PER_GROUP = 32  # so that one image of a large partition can be read alone
_END_BYTES = 2**16  # holds the footer of a partition of any usual size
# The errors that pyarrow and this module raise for damaged bytes. The store raises other errors.
_UNREADABLE = (pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)

Bytes = bytes | bytearray


def encode_table(columns: Mapping[str, Tensor], content_hash: str, summary: PartitionSummary) -> bytes:
    """Return the bytes of a Parquet file with the rows of a partition.

    The axes of a column after the first one are stored as a fixed-size list, with their shape in the field's metadata.
    Columns of images come last, so that the other columns of a row group are adjacent.
    """
    names = sorted(columns, key=lambda name: columns[name].dim() > 2)
    arrays = [_to_arrow(columns[name]) for name in names]
    fields = [
        pa.field(name, array.type, nullable=False, metadata={"shape": json.dumps([*columns[name].shape[1:]])})
        for name, array in zip(names, arrays, strict=True)
    ]
    metadata = {"schema_version": SCHEMA_VERSION, "content_hash": content_hash, "summary": asdict(summary)}
    return _parquet(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), _ROWS_PER_GROUP, metadata)


def candidates_table(selection: Selection) -> bytes:
    """Return the Parquet file of all candidates of a search: one row per candidate and beta."""
    grid, log_cutoffs = selection.grid, selection.log_one_minus_cutoffs
    axes = np.meshgrid(grid.betas, grid.scales, grid.powers, grid.biases, indexing="ij")
    cutoffs = -log_cutoffs.expm1()
    tensors = {
        "objective": selection.objectives.masked_fill(selection.undeployable, math.nan),
        "kept": selection.kept, "log_one_minus_cutoff": log_cutoffs,
        "alpha": 1 / (1 + cutoffs), "one_minus_alpha": cutoffs / (1 + cutoffs),
        "feasible": ~selection.infeasible, "deployable": ~selection.undeployable,
    }  # fmt: skip
    table = pa.table({
        **{name: axis.reshape(-1) for name, axis in zip(("beta", "scale", "power", "bias"), axes, strict=True)},
        **{name: values.reshape(-1).numpy() for name, values in tensors.items()},
        "clamp": pa.repeat(grid.clamp, cutoffs.numel()).dictionary_encode(),
        "ln_k": pa.repeat(pa.scalar(grid.ln_k, pa.int64()), cutoffs.numel()),
    })  # fmt: skip
    return _parquet(table, len(table), {})


def _parquet(table: pa.Table, n_rows_per_group: int, metadata: Mapping[str, Any]) -> bytes:
    """Return a Parquet file with this metadata and its checksums."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table, row_group_size=n_rows_per_group)
        before = sink.getvalue()
        metadata = {**metadata, "n_bytes": len(before), "sha256": hashlib.sha256(before).hexdigest()}
        writer.add_key_value_metadata({_METADATA: json.dumps(metadata), _SHA256: _ZEROS})
    content = sink.getvalue()
    footer = content[-_footer_size(content) :]
    return before + footer.replace(_ZEROS, hashlib.sha256(footer).hexdigest().encode())


def _footer_size(end: Bytes) -> int:
    return int.from_bytes(end[-8:-4], "little") + 8


def _metadata(end: Bytes) -> tuple[dict[str, Any], int]:
    """Return the metadata and the size of a file, from its last bytes; damaged bytes raise one of `_UNREADABLE`."""
    pairs = pq.ParquetFile(pa.BufferReader(end)).metadata.metadata
    footer = bytes(end[-_footer_size(end) :])
    if hashlib.sha256(footer.replace(pairs[_SHA256], _ZEROS)).hexdigest().encode() != pairs[_SHA256]:
        raise ValueError("its footer is not the one that was written")
    metadata: dict[str, Any] = json.loads(pairs[_METADATA])
    return metadata, metadata["n_bytes"] + len(footer)


def table_problem(content: Bytes) -> str | None:
    """Describe the damage of a whole Parquet file, or return None."""
    try:
        metadata, n_bytes = _metadata(content)
    except _UNREADABLE as error:
        return f"{type(error).__name__}: {reason_of(error)}"
    same = len(content) == n_bytes and hashlib.sha256(content[: metadata["n_bytes"]]).hexdigest() == metadata["sha256"]
    return None if same else "its bytes are not those that were written"


def _read_end(store: Store, path: str) -> bytes:
    """Return the last bytes of a file, which hold its footer."""
    end = store.read(path, -_END_BYTES)
    needed = _footer_size(end)
    return store.read(path, -needed) if len(end) == _END_BYTES < needed else end


def _summary_in(end: Bytes, content_hash: str, partition: Partition) -> PartitionSummary | None:
    """Return the summary in the last bytes of a partition's file; None if they are damaged or belong to other rows."""
    try:
        metadata, n_bytes = _metadata(end)
        summary = replace(from_plain(PartitionSummary, metadata["summary"]), n_bytes=n_bytes)
        return summary if metadata["content_hash"] == content_hash and summary.is_of(partition) else None
    except _UNREADABLE:
        return None


def finished_rows(store: Store, path: str, content_hash: str, partition: Partition) -> PartitionSummary | None:
    """Return the summary of a partition's file; None if it is missing, damaged or holds other rows."""
    try:
        return _summary_in(_read_end(store, path), content_hash, partition)
    except MissingArtifact:
        return None


def create_whole(
    store: Store, path: str, content: bytes, content_hash: str, partition: Partition
) -> PartitionSummary | None:
    """Write a partition's file and return None. If a whole file exists, keep that file and return its summary.

    An existing file that is damaged or holds other rows is quarantined.
    """
    while not store.create(path, content):
        try:
            found = store.read(path)
        except MissingArtifact:  # another driver has just quarantined it
            continue
        if not table_problem(found) and (existing := _summary_in(found, content_hash, partition)):
            return existing
        store.set_aside(path, hashlib.sha256(found).hexdigest())
    return None


def read_columns(
    store: Store, stage: str, partitions: Sequence[Partition], content_hash: str, columns: Sequence[str], *,
    sample_ids: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return these columns of all partitions, each as one tensor.

    Args:
        sample_ids: read only these images, in ascending order, and only the row groups that hold them.

    Raises:
        MissingArtifact: if a partition has no file.
        DamagedFile: if a file has changed since it was written. This function does not rename it.
        ContentHashMismatch: if a file holds other rows or columns.
    """
    import torch

    def read(wanted: tuple[Partition, Tensor]) -> dict[str, Tensor]:
        """Read the needed ranges of a partition's file or, if that fails, all of it."""
        partition, rows = wanted
        path = f"{rows_folder(stage, content_hash)}/{partition.file_name}"

        def decoded(content: Bytes) -> dict[str, Tensor]:
            if _summary_in(content, content_hash, partition) is None:
                raise ValueError(f"it does not hold {partition} of {content_hash}")
            return _decoded(content, rows, columns)

        try:
            values = decoded(_needed_bytes(store, path, rows, columns))
        except _UNREADABLE:  # the transfer may have damaged the bytes, because S3 protects only reads of whole files
            content = store.read(path)
            if problem := table_problem(content):
                raise damaged(store.address(path), problem, content) from None
            try:
                values = decoded(content)
            except _UNREADABLE as error:
                raise ContentHashMismatch(f"{store.address(path)} is not what this run needs: {error}") from error
        if problem := next(filter(None, map(unusable_values, values, values.values())), None):
            raise damaged(store.address(path), problem, store.read(path))
        return values

    rows_of = [
        (partition, torch.arange(len(partition)) if sample_ids is None else rows_among(sample_ids, partition))
        for partition in partitions
    ]
    found = concurrently(read, [(partition, rows) for partition, rows in rows_of if len(rows)])
    return {name: torch.cat([part.pop(name) for part in found]) for name in columns}


def _needed_bytes(store: Store, path: str, rows: Tensor, columns: Sequence[str]) -> Bytes:
    """Return a file's bytes. Only the end and the needed row groups and columns are read; the other bytes are zeros."""
    end = _read_end(store, path)
    _, n_bytes = _metadata(end)
    if n_bytes <= len(end):
        return end
    content, metadata = bytearray(n_bytes), pq.ParquetFile(pa.BufferReader(end)).metadata
    for group in map(metadata.row_group, np.unique(rows.numpy() // _ROWS_PER_GROUP).tolist()):
        chunks = [group.column(i) for i in range(group.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        start = min(starts)
        stop = max(begin + chunk.total_compressed_size for begin, chunk in zip(starts, chunks, strict=True))
        content[start:stop] = store.read(path, start, stop)
    content[n_bytes - len(end) :] = end
    return content


def _decoded(content: Bytes, rows: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """Return columns of some rows; damaged bytes raise one of `_UNREADABLE`."""
    groups, nth_group = np.unique(rows.numpy() // _ROWS_PER_GROUP, return_inverse=True)
    parquet = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
    table = parquet.read_row_groups(groups.tolist(), columns=list(columns))
    places = nth_group * _ROWS_PER_GROUP + rows.numpy() % _ROWS_PER_GROUP
    return {name: to_tensor(table.column(name), table.schema.field(name))[places] for name in columns}


def damaged(address: str, problem: object, content: bytes) -> DamagedFile:
    """Return the error for a file with this content, which has changed since it was written."""
    message = f"{address} is damaged ({problem}): `mixednuts run` quarantines it and computes it again"
    return DamagedFile(message, address, content)


def unusable_values(name: str, values: Tensor) -> str | None:
    """Return a message if a column has NaN, or if logits or images are infinite; log margins may be infinite."""
    if not values.is_floating_point():
        return None
    bad = ~values.isfinite() if values.dim() > 1 else values.isnan()
    n_rows = int(bad.reshape(len(bad), -1).any(dim=1).sum())
    return f"{name} holds NaN or infinity in {n_rows} of {len(values)} rows" if n_rows else None


def read_attack_records(
    store: Store, partitions: Sequence[Partition], content_hash: str, *, stage: str = "attack",
    sample_ids: Tensor | None = None,
) -> AttackRecords:  # fmt: skip
    """Return rows of the attack stage, or of a study's attack, without images; all rows by default.

    Errors are those of `read_columns`.
    """
    columns = (
        "sample_id", "label", "std_clean", "std_attacked", "rob_clean", "rob_attacked", "log_one_minus_margin",
        "std_broken", "rob_broken",
    )  # fmt: skip
    return AttackRecords(*read_columns(store, stage, partitions, content_hash, columns, sample_ids=sample_ids).values())


def read_evaluate_records(
    store: Store, partitions: Sequence[Partition], content_hash: str, attacks: Sequence[str], *,
    stage: str = "evaluate", classifier: str = "mixed",
) -> EvaluateRecords:  # fmt: skip
    """Return all rows of the evaluate stage, or of a study, without images; errors as in `read_columns`."""
    survived = [f"{SURVIVED}{attack}" for attack in attacks]
    columns = ["sample_id", "label", f"{classifier}_clean", f"{classifier}_attacked", "clean", "robust", *survived]
    values = read_columns(store, stage, partitions, content_hash, columns).values()
    ids, labels, clean, attacked, right, robust, *after = values
    return EvaluateRecords(ids, labels, clean, attacked, right, robust, dict(zip(attacks, after, strict=True)))


def _to_arrow(values: Tensor) -> Any:
    """Return a column as an Arrow array. `pa.array` would import pandas first, which takes each worker 1.5 s."""
    flat = values.detach().cpu().contiguous().reshape(-1).numpy()
    bits = np.packbits(flat, bitorder="little") if flat.dtype == np.bool_ else flat
    array = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), flat.size, [None, pa.py_buffer(bits)])
    return array if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(array, values[0].numel())


def to_tensor(column: Any, field: Any) -> Tensor:
    """Return a column of a table that `encode_table` wrote, one row per image; KeyError if the field has no shape.

    Arrow's `to_numpy` would import pandas first.
    """
    import torch

    shape, array = json.loads(field.metadata[b"shape"]), column.combine_chunks()
    array = array.flatten() if shape else array
    is_bool = pa.types.is_boolean(array.type)
    values = torch.utils.dlpack.from_dlpack(array.cast(pa.uint8()) if is_bool else array)
    return (values.bool() if is_bool else values.clone()).reshape(-1, *shape)

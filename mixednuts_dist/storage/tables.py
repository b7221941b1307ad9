"""Parquet files of the attack and evaluate stages: one row per image, and a footer with the partition's summary.

Shapes: B images of one partition, N of the run, K classes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.run_config import digest
from ..errors import ContentHashMismatch, DamagedFile, MissingArtifact, NewerSchema
from .partitions import Partition, rows_among, rows_folder
from .records import AttackRecords, EvaluateRecords, PartitionSummary
from .store import Store, concurrently

if TYPE_CHECKING:  # commands that only look at a run's footers do not import PyTorch
    from torch import Tensor

SCHEMA_VERSION = 5
SURVIVED = "survived_"  # column prefix, before the attack's name
FLAG = "flag_"  # column prefix, before the red flag's name
FOOTER = b"mixednuts"
_IMAGES = ("x_adv",)  # the attacks keep images in [0, 1], so these large columns are not checked for NaN
_ROWS_PER_GROUP = 32  # at most, so that one image of a large partition can be read alone
_FILES_AT_ONCE = 8
_TAIL_BYTES = 2**16  # holds the footer of a partition of any usual size
_CHECKED = {"page_checksum_verification": True}
# The errors of pyarrow and of this module for bytes that are not those that were written. The store has others.
_UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError)

Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Footer:
    """The identity and summary of a file, which can be read without its rows."""

    content_hash: str
    schema_version: int
    summary: PartitionSummary


# --- writing and footers ----------------------------------------------------------------------------------------------


def encode_table(columns: Mapping[str, Tensor], content_hash: str, summary: PartitionSummary) -> bytes:
    """Return the bytes of a Parquet file. A column's trailing axes become a fixed-size list, their shape metadata."""
    arrays = {name: _to_arrow(values) for name, values in columns.items()}
    fields = [
        pa.field(name, array.type, nullable=False, metadata={"shape": json.dumps([*columns[name].shape[1:]])})
        for name, array in arrays.items()
    ]
    stored = {name: value for name, value in asdict(summary).items() if name not in ("sha256", "n_bytes")}
    footer = {
        "schema_version": SCHEMA_VERSION, "content_hash": content_hash, "summary": stored,
        "columns": _described(fields),
    }  # fmt: skip
    schema = pa.schema(fields, metadata={FOOTER: json.dumps({**footer, "digest": digest(footer)})})
    table, sink = pa.Table.from_arrays([*arrays.values()], schema=schema), io.BytesIO()
    pq.write_table(table, sink, row_group_size=_ROWS_PER_GROUP, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def read_footer(store: Store, path: str) -> Footer | None:
    """Return the footer of a file, or None if the file is missing, damaged or of another kind.

    Raises:
        NewerSchema: if a newer release has written it.
    """
    try:
        tail = store.read_tail(path, _TAIL_BYTES)
        needed = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) == _TAIL_BYTES < needed:
            tail = store.read_tail(path, needed)
        return footer_of(io.BytesIO(tail), store.address(path))
    except (MissingArtifact, *_UNREADABLE):
        return None


def finished_summary(store: Store, path: str, content_hash: str) -> PartitionSummary | None:
    """Return the summary of a finished file, or None if the file is missing, damaged or of another kind.

    Raises:
        NewerSchema: if a newer release has written it.
        ContentHashMismatch: if it belongs to another run.
    """
    footer = read_footer(store, path)
    if footer is None:
        return None
    _require_hash(store.address(path), footer, content_hash)
    return footer.summary


def footer_of(file: Any, address: str = "the file") -> Footer:
    """Return the footer of an open file, or of its last bytes. The version is read before any other value.

    Raises:
        NewerSchema: for a version that this release does not know.
        ValueError, KeyError, TypeError and others in `_UNREADABLE`: if the footer is not what was written.
    """
    return _footer(pq.ParquetFile(file).schema_arrow, address)


def _footer(schema: Any, address: str) -> Footer:
    content = json.loads(schema.metadata[FOOTER])
    version = content["schema_version"]
    if version != SCHEMA_VERSION:
        raise NewerSchema(
            f"{address} has schema version {version!r}; this release reads {SCHEMA_VERSION}. Nothing was "
            "changed. Use the release that wrote it"
        )
    if content.pop("digest") != digest(content):
        raise ValueError("its footer is not the one that was written")
    if content["columns"] != _described(schema):
        raise ValueError("its columns are not those that were written")
    return Footer(content["content_hash"], version, PartitionSummary.from_json(content["summary"]))


def _require_hash(address: str, footer: Footer, content_hash: str) -> None:
    if footer.content_hash != content_hash:
        raise ContentHashMismatch(
            f"{address} has the content hash {footer.content_hash}, this run has {content_hash}: the weights, the data "
            "or the parameters differ from those of its rows. Give the run another name, or delete that file"
        )


def table_problem(content: bytes, *, has_footer: bool = False) -> str | None:
    """Describe the damage of a Parquet file of any kind, or return None.

    Args:
        has_footer: whether the file must have this package's footer, which a table of candidates does not have.

    Raises:
        NewerSchema: if a newer release has written it.
    """
    try:
        parquet = pq.ParquetFile(io.BytesIO(content), **_CHECKED)
        table = parquet.read()  # reading in batches would not notice a column without pages
        if not has_footer and FOOTER not in (parquet.schema_arrow.metadata or {}):
            return None
        _footer(parquet.schema_arrow, "the file")
        checked = (field for field in table.schema if field.name not in _IMAGES)
        values = ((field.name, to_tensor(table.column(field.name), field)) for field in checked)
        return next(filter(None, (unusable_values(*each) for each in values)), None)
    except NewerSchema:
        raise
    except Exception as error:  # for damaged bytes pyarrow raises almost any built-in exception
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def unusable_values(name: str, values: Tensor) -> str | None:
    """Describe NaN in a column, or infinity in a column of logits; the logarithm of a margin may be infinite."""
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return None
    bad = values.isfinite().logical_not() if values.dim() > 1 else values.isnan()
    n_rows = int(bad.flatten(1).any(dim=1).sum() if bad.dim() > 1 else bad.sum())
    return f"{name} holds NaN or infinity in {n_rows} of {len(values)} rows" if n_rows else None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_columns(
    store: Store, stage: str, partitions: Sequence[Partition], content_hash: str, columns: Sequence[str], *,
    sample_ids: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return these columns of all partitions, each as one tensor.

    Args:
        sample_ids: read only these images, in ascending order; files that hold none of them are not opened.

    Raises:
        MissingArtifact: if a partition has no file.
        DamagedFile: if a file is not what was written, or lacks rows; it is not changed.
        ContentHashMismatch: if a file belongs to another run, or (NewerSchema) to a newer release.
    """
    import torch

    folder = rows_folder(stage, content_hash)
    found: dict[str, Tensor] = {}
    rows_of = {partition: torch.arange(len(partition)) for partition in partitions}
    if sample_ids is not None:
        rows_of = {partition: rows for partition in partitions if len(rows := rows_among(sample_ids, partition))}
    sizes = store.sizes(folder, {part.stem for part in rows_of}) if len(rows_of) > _FILES_AT_ONCE else {}

    def read(partition: Partition) -> dict[str, Tensor]:
        return _read_partition(store, folder, partition, sizes.get(partition.file_name), content_hash, columns)

    n_rows, at = sum(map(len, rows_of.values())), 0
    needed = list(rows_of)
    for i in range(0, len(needed), _FILES_AT_ONCE):
        at_once = needed[i : i + _FILES_AT_ONCE]
        for partition, part in zip(at_once, concurrently(read, at_once), strict=True):
            rows = rows_of[partition]
            for name, values in part.items():
                if name not in found:
                    found[name] = values.new_empty((n_rows, *values.shape[1:]))
                if values.shape[1:] != found[name].shape[1:]:
                    shapes = f"{[*values.shape[1:]]} and {[*found[name].shape[1:]]}"
                    raise ContentHashMismatch(
                        f"{store.address(stage)}: {name} has rows of shape {shapes}: a classifier has changed its "
                        f"number of classes while {len(partitions)} partitions were computed. Delete that folder and "
                        "run again"
                    )
                found[name][at : at + len(rows)] = values[rows]
            at += len(rows)
    return found


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
    values = read_columns(store, stage, partitions, content_hash, columns, sample_ids=sample_ids)
    return AttackRecords(*(values[column] for column in columns))


def read_evaluate_records(
    store: Store, partitions: Sequence[Partition], content_hash: str, attacks: Sequence[str], *, stage: str = "evaluate"
) -> EvaluateRecords:
    """Return all rows of the evaluate stage, or of a study, without images; errors as in `read_columns`."""
    survived = [f"{SURVIVED}{attack}" for attack in attacks]
    columns = ["sample_id", "label", "mixed_clean", "mixed_attacked", "robust", *survived]
    values = read_columns(store, stage, partitions, content_hash, columns)
    ids, labels, clean, attacked, robust, *after = (values[column] for column in columns)
    return EvaluateRecords(ids, labels, clean, attacked, robust, dict(zip(attacks, after, strict=True)))


def read_rows(
    store: Store, stage: str, partition: Partition, content_hash: str, column: str, sample_ids: Sequence[int]
) -> Tensor:
    """Return one column of some images of a partition, in the order of `sample_ids`; reads only their row groups.

    Raises:
        MissingArtifact, DamagedFile, ContentHashMismatch: as in `read_columns`.
    """
    import torch

    def read(parquet: Any) -> Tensor:
        first_rows = np.cumsum([0, *(parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups))])
        found = []
        for row in (sample_id - partition.start for sample_id in sample_ids):
            if not 0 <= row < first_rows[-1]:
                raise ValueError(f"it does not hold image {row + partition.start}")
            group = int(np.searchsorted(first_rows, row, side="right")) - 1
            table = parquet.read_row_group(group, columns=[column])
            found.append(to_tensor(table.column(column).slice(row - first_rows[group], 1), table.schema.field(column)))
        return torch.cat(found)

    return _read(store, f"{rows_folder(stage, content_hash)}/{partition.file_name}", None, content_hash, read)


def _read_partition(
    store: Store, folder: str, partition: Partition, size: int | None, content_hash: str, columns: Sequence[str]
) -> dict[str, Tensor]:
    import torch

    def read(parquet: Any) -> dict[str, Tensor]:
        table = parquet.read(columns=list(columns))
        values = {name: to_tensor(table.column(name), table.schema.field(name)) for name in columns}
        expected = torch.arange(partition.start, partition.stop)
        if bad := next(filter(None, map(unusable_values, values, values.values())), None):
            raise ValueError(bad)
        if len(table) != len(expected) or not torch.equal(values.get("sample_id", expected), expected):
            raise ValueError(f"it does not hold {partition}")
        return values

    return _read(store, f"{folder}/{partition.file_name}", size, content_hash, read)


def _read(store: Store, path: str, size: int | None, content_hash: str, read: Callable[[Any], Rows]) -> Rows:
    """Return `read` of a file's needed ranges or, if that fails, of the whole file, which has a checksum on the way."""

    def decoded(file: Any) -> Rows:
        parquet = pq.ParquetFile(file, pre_buffer=True, **_CHECKED)
        _require_hash(address, _footer(parquet.schema_arrow, address), content_hash)
        return read(parquet)

    address = store.address(path)
    try:
        return decoded(store.open(path, size))
    except _UNREADABLE:
        content = store.read(path)
    try:
        return decoded(io.BytesIO(content))
    except _UNREADABLE as error:
        if table_problem(content, has_footer=True) is None:
            raise ContentHashMismatch(f"{address} is not what this run needs: {error}") from error
        raise DamagedFile(
            f"{address} is damaged ({error}): `mixednuts run` quarantines it and computes it again", address
        ) from error


# --- columns ----------------------------------------------------------------------------------------------------------


def _described(fields: Iterable[Any]) -> str:
    """Return a checksum of the columns' names, types and shapes; Parquet itself has checksums of pages only."""
    described = []
    for field in fields:
        is_list = pa.types.is_fixed_size_list(field.type)  # its text differs between releases of pyarrow
        kind, n_each = (field.type.value_type, field.type.list_size) if is_list else (field.type, 1)
        described.append([field.name, str(kind), n_each, json.loads(field.metadata[b"shape"])])
    return digest({"columns": described})


def _to_arrow(values: Tensor) -> Any:
    """Return a column as an array. `pa.array` would import pandas first, which takes each worker 1.5 s."""
    flat = values.detach().cpu().contiguous().reshape(-1).numpy()
    bits = np.packbits(flat, bitorder="little") if flat.dtype == np.bool_ else flat
    array = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), flat.size, [None, pa.py_buffer(bits)])
    return array if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(array, values[0].numel())


def to_tensor(column: Any, field: Any) -> Tensor:
    """Return a column of a table that `encode_table` wrote, one row per image; KeyError if the field has no shape."""
    import torch

    shape = json.loads(field.metadata[b"shape"])
    array = column.combine_chunks()
    if shape:
        array = array.flatten()
    dtype = np.dtype(array.type.to_pandas_dtype())
    content = array.buffers()[1]
    if dtype == np.bool_:
        bits = np.unpackbits(np.frombuffer(content, np.uint8), count=array.offset + len(array), bitorder="little")
        values = bits[array.offset :].astype(np.bool_)
    else:
        values = np.frombuffer(content, dtype, len(array), array.offset * dtype.itemsize).copy()
    return torch.from_numpy(values).reshape(-1, *shape)

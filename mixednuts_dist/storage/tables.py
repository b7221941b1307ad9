"""Parquet files of the attack and evaluate stages: one row an image, a footer that says whose rows they are.

Shapes: B images of one partition, N of the run, K classes.
"""

from __future__ import annotations

import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.run_config import digest
from ..errors import DamagedFile, FingerprintMismatch, MissingArtifact, NewerSchema
from .partitions import Partition, rows_among, rows_folder
from .records import AttackRecords, EvaluateRecords, Receipt
from .store import Store

if TYPE_CHECKING:  # what only looks at a run's footers does without PyTorch
    from torch import Tensor

SCHEMA_VERSION = 5
SURVIVED = "survived_"  # column prefix; the attack's name follows
FLAG = "flag_"  # column prefix; the red flag's name follows
FOOTER = b"mixednuts"
_IMAGES = ("x_adv",)  # far larger than all else; the attacks keep them in [0, 1]
_READS = 20  # of a file that is whole and came damaged
_ROWS_AT_A_TIME = 16  # of images, where only a few are wanted
_FILES_AHEAD = 8  # read before their turn, while a reader works on the one before
_TAIL_BYTES = 2**16  # holds any footer of ours: a few kilobytes
_CHECKED = {"page_checksum_verification": True}
# What pyarrow and we raise at bytes that are not those that were written; the store's own errors are none of these.
_UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError)

Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Footer:
    """The identity of a file, read without its rows."""

    fingerprint: str
    schema_version: int
    receipt: Receipt


def encode_table(columns: Mapping[str, Tensor], fingerprint: str, receipt: Receipt) -> bytes:
    """The bytes of a Parquet file; a column's trailing axes become a fixed-size list, their shape metadata."""
    arrays, fields = [], []
    for name, values in columns.items():
        array = _to_arrow(values)
        shape = json.dumps(list(values.shape[1:]))
        arrays.append(array)
        fields.append(pa.field(name, array.type, nullable=False, metadata={"shape": shape}))
    told = {name: value for name, value in asdict(receipt).items() if name not in ("sha256", "n_bytes")}
    footer = {
        "schema_version": SCHEMA_VERSION, "fingerprint": fingerprint, "receipt": told, "columns": _described(fields)
    }  # fmt: skip
    schema = pa.schema(fields, metadata={FOOTER: json.dumps({**footer, "digest": digest(footer)})})
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def read_footer(store: Store, path: str) -> Footer | None:
    """The footer of a file, or None where the file is missing, damaged or not ours; one call of the store.

    Raises:
        NewerSchema: where a newer release has written it.
    """
    try:
        tail = store.read_tail(path, _TAIL_BYTES)
        return _footer(pq.ParquetFile(io.BytesIO(tail)).schema_arrow, store.address(path))
    except (MissingArtifact, *_UNREADABLE):
        return None


def finished_receipt(store: Store, path: str, fingerprint: str) -> Receipt | None:
    """The receipt of a whole file; None where the file is missing, damaged or not ours.

    Raises:
        NewerSchema: where a newer release has written it.
        FingerprintMismatch: where it is of another run.
    """
    footer = read_footer(store, path)
    if footer is None:
        return None
    check_footer(store.address(path), footer, fingerprint)
    return footer.receipt


def is_whole(content: bytes) -> bool:
    """Whether a file's bytes, every page and the footer, are those that were written.

    Raises:
        NewerSchema: where a newer release has written it.
    """
    try:
        parquet = pq.ParquetFile(io.BytesIO(content), **_CHECKED)
        parquet.read()  # batch by batch, a column that has lost its pages would not be noticed
        _footer(parquet.schema_arrow, "the file")
    except _UNREADABLE:
        return False
    return True


def footer_of(content: bytes) -> Footer:
    """What a whole file says of itself; errors as in `_footer`."""
    return _footer(pq.ParquetFile(io.BytesIO(content)).schema_arrow, "the file")


def unusable_column(content: bytes) -> str | None:
    """Which column of a whole file holds values that no stage can go on from."""
    try:
        table = pq.ParquetFile(io.BytesIO(content))
        for field in table.schema_arrow:
            if field.name not in _IMAGES and (bad := unusable_values(field.name, _column(table, field))):
                return bad
    except _UNREADABLE as error:  # the footer's description of a column has no checksum of its own
        return f"its columns cannot be read ({error})"
    return None


def _column(parquet: Any, field: Any) -> Tensor:
    return to_tensor(parquet.read(columns=[field.name]).column(field.name), field)


def unusable_values(name: str, values: Tensor) -> str | None:
    """What is wrong with a column's numbers: NaN anywhere, or infinity among logits (a margin's logarithm may be)."""
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return None
    bad = values.isfinite().logical_not() if values.dim() > 1 else values.isnan()
    n_rows = int(bad.flatten(1).any(dim=1).sum() if bad.dim() > 1 else bad.sum())
    return f"{name} holds NaN or infinity in {n_rows} of {len(values)} rows" if n_rows else None


def stream_columns(
    store: Store, stage: str, partitions: Sequence[Partition], fingerprint: str, columns: Sequence[str]
) -> Iterator[dict[str, Tensor]]:
    """These columns of one partition after the other, in order; only a few files are in memory at a time.

    Raises:
        MissingArtifact: where a partition has no file.
        DamagedFile: where a file is not what was written, or lacks rows; it is left as it is.
        FingerprintMismatch: where a file is of another run, or (NewerSchema) of a newer release.
    """

    def read(partition: Partition) -> dict[str, Tensor]:
        path, size = f"{folder}/{partition.file_name}", sizes.get(partition.file_name)
        return _read_one(store, path, size, partition, fingerprint, columns)

    folder = rows_folder(stage, fingerprint)
    sizes = store.sizes(folder, {part.stem for part in partitions}) if len(partitions) > _FILES_AHEAD else {}
    with ThreadPoolExecutor(_FILES_AHEAD, thread_name_prefix="columns") as threads:
        waiting: deque[Future[dict[str, Tensor]]] = deque()
        for partition in partitions:
            waiting.append(threads.submit(read, partition))
            if len(waiting) > _FILES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read_columns(
    store: Store,
    stage: str,
    partitions: Sequence[Partition],
    fingerprint: str,
    columns: Sequence[str],
    *,
    sample_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """The same of all partitions at once, each column one tensor; memory for the result and a few files.

    Args:
        sample_ids: read only these images, ascending; files that hold none of them are not opened.
    """
    import torch

    found: dict[str, Tensor] = {}
    asked = {partition: torch.arange(len(partition)) for partition in partitions}
    if sample_ids is not None:
        asked = {partition: rows for partition in partitions if len(rows := rows_among(sample_ids, partition))}
    n_rows, at = sum(map(len, asked.values())), 0
    parts = stream_columns(store, stage, list(asked), fingerprint, columns)
    for rows, part in zip(asked.values(), parts, strict=True):
        for name, values in part.items():
            if name not in found:
                found[name] = values.new_empty((n_rows, *values.shape[1:]))
            if values.shape[1:] != found[name].shape[1:]:
                raise _of_another_shape(store, stage, partitions, name, values, found[name])
            found[name][at : at + len(rows)] = values[rows]
        at += len(rows)
    return found


def read_attack_records(
    store: Store,
    partitions: Sequence[Partition],
    fingerprint: str,
    *,
    stage: str = "attack",
    sample_ids: Tensor | None = None,
) -> AttackRecords:
    """The rows of the attack stage (or of a study's, which has a folder of its own), without images; all by default.

    Errors as in `stream_columns`.
    """
    names = {
        "sample_ids_N": "sample_id",
        "labels_N": "label",
        "std_clean_NK": "std_clean",
        "std_attacked_NK": "std_attacked",
        "rob_clean_NK": "rob_clean",
        "rob_attacked_NK": "rob_attacked",
        "log_one_minus_margin_N": "log_one_minus_margin",
        "std_broken_N": "std_broken",
        "rob_broken_N": "rob_broken",
    }
    values = read_columns(store, stage, partitions, fingerprint, list(names.values()), sample_ids=sample_ids)
    return AttackRecords(**{field: values[column] for field, column in names.items()})


def read_evaluate_records(
    store: Store, partitions: Sequence[Partition], fingerprint: str, attacks: Sequence[str], *, stage: str = "evaluate"
) -> EvaluateRecords:
    """All rows of the evaluate stage (or of a study's), without images; errors as in `stream_columns`."""
    survived = [f"{SURVIVED}{attack}" for attack in attacks]
    columns = ["sample_id", "label", "mixed_clean", "mixed_attacked", "robust", *survived]
    values = read_columns(store, stage, partitions, fingerprint, columns)
    return EvaluateRecords(
        sample_ids_N=values["sample_id"],
        labels_N=values["label"],
        mixed_clean_NK=values["mixed_clean"],
        mixed_attacked_NK=values["mixed_attacked"],
        robust_N=values["robust"],
        survived={attack: values[f"{SURVIVED}{attack}"] for attack in attacks},
    )


def read_rows(
    store: Store, stage: str, partition: Partition, fingerprint: str, column: str, sample_ids: Sequence[int]
) -> Tensor:
    """One column of some images of a partition, in the order of `sample_ids`; holds a few rows at a time, never all.

    Raises:
        MissingArtifact, DamagedFile, FingerprintMismatch: as in `stream_columns`.
    """
    import torch

    path = f"{rows_folder(stage, fingerprint)}/{partition.file_name}"

    def read() -> Tensor:
        found = {}
        with store.open(path) as file:
            parquet = pq.ParquetFile(file, **_CHECKED)
            check_footer(store.address(path), _footer(parquet.schema_arrow, store.address(path)), fingerprint)
            field, start = parquet.schema_arrow.field(column), partition.start
            for batch in parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=[column]):
                for sample_id in sample_ids:
                    if start <= sample_id < start + len(batch):
                        row = pa.Table.from_batches([batch.slice(sample_id - start, 1)])
                        found[sample_id] = to_tensor(row.column(column), field)
                start += len(batch)
        return torch.cat([found[sample_id] for sample_id in sample_ids])

    return _until_readable(store, path, read)


def _read_one(
    store: Store, path: str, size: int | None, partition: Partition, fingerprint: str, columns: Sequence[str]
) -> dict[str, Tensor]:
    import torch

    def read() -> dict[str, Tensor]:
        with store.open(path, size) as file:
            parquet = pq.ParquetFile(file, pre_buffer=True, **_CHECKED)
            check_footer(store.address(path), _footer(parquet.schema_arrow, store.address(path)), fingerprint)
            table = parquet.read(columns=list(columns))
            values = {name: to_tensor(table.column(name), table.schema.field(name)) for name in columns}
        expected = torch.arange(partition.start, partition.stop)
        if bad := next(filter(None, map(unusable_values, values, values.values())), None):
            raise ValueError(bad)
        if len(table) != len(expected) or not torch.equal(values.get("sample_id", expected), expected):
            raise ValueError(f"it does not hold {partition}")
        return values

    return _until_readable(store, path, read)


def _until_readable(store: Store, path: str, read: Callable[[], Rows]) -> Rows:
    """`read()`, again where the file is whole: its ranges have no checksums on the way, only its pages have."""
    for tries_left in reversed(range(_READS)):
        try:
            return read()
        except _UNREADABLE as error:
            unusable = _unusable(store, path, error)
            if isinstance(unusable, DamagedFile) or not tries_left:
                raise unusable from error
    raise AssertionError  # the last try returns or raises


def _of_another_shape(
    store: Store, stage: str, partitions: Sequence[Partition], name: str, one: Tensor, other: Tensor
) -> FingerprintMismatch:
    shapes = f"{[*one.shape[1:]]} and {[*other.shape[1:]]}"
    return FingerprintMismatch(
        f"{store.address(stage)}: {name} has rows of shape {shapes}: a classifier has changed its number of classes "
        f"while {len(partitions)} partitions were computed. Delete that folder and run again"
    )


def _unusable(store: Store, path: str, error: Exception) -> FingerprintMismatch:
    """The error for a file that could not be read, after a second look at all of it; the file is left alone."""
    content = store.read(path)
    if is_whole(content) and not unusable_column(content):
        return FingerprintMismatch(f"{store.address(path)} is not what this run needs: {error}")
    address = store.address(path)
    return DamagedFile(f"{address} is damaged ({error}): `mixednuts run` sets it aside and computes it again", address)


def check_footer(address: str, footer: Footer, fingerprint: str) -> None:
    """Refuse a file of another run.

    Raises:
        FingerprintMismatch: with both values and what to do.
    """
    if footer.fingerprint != fingerprint:
        raise FingerprintMismatch(
            f"{address} has the content hash {footer.fingerprint}, this run has {fingerprint}: the weights, the data "
            "or the parameters differ from those of its rows. Give the run another name, or delete that file"
        )


def _footer(schema: Any, address: str) -> Footer:
    """What a schema's metadata say. The version is looked at before anything else of it is expected.

    Raises:
        NewerSchema: for a version that this release does not know.
        ValueError, KeyError, TypeError: where it is not what was written.
    """
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
    return Footer(content["fingerprint"], version, Receipt.from_json(content["receipt"]))


def _described(fields: Iterable[Any]) -> str:
    """A checksum of the columns' names, types and shapes; Parquet has one of its pages alone."""
    described = []
    for field in fields:
        is_list = pa.types.is_fixed_size_list(field.type)  # its text differs between releases of pyarrow
        kind, n_each = (field.type.value_type, field.type.list_size) if is_list else (field.type, 1)
        described.append([field.name, str(kind), n_each, json.loads(field.metadata[b"shape"])])
    return digest({"columns": described})


def _to_arrow(values: Tensor) -> Any:
    """From the buffer itself: `pa.array` first imports pandas, a second and a half of each worker's time."""
    flat = values.detach().cpu().contiguous().reshape(-1).numpy()
    bits = np.packbits(flat, bitorder="little") if flat.dtype == np.bool_ else flat
    array = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), flat.size, [None, pa.py_buffer(bits)])
    return array if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(array, values[0].numel())


def to_tensor(column: Any, field: Any) -> Tensor:
    """A column of a table that `encode_table` wrote, one row an image; KeyError where the schema has no shape of it."""
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

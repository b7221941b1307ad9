"""Parquet files of the attack and evaluate stages: one row an image, a footer that says whose rows they are.

Shapes: B images of one partition, N of the run, K classes.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..errors import FingerprintMismatch, MissingArtifact
from .partitions import Partition
from .records import AttackRecords, EvaluateRecords, Receipt
from .store import Store

SCHEMA_VERSION = 1
SURVIVED = "survived_"  # column prefix; the attack's name follows
_FOOTER = b"mixednuts"
_UNREADABLE = (pa.ArrowInvalid, pa.ArrowException, OSError, KeyError, ValueError, TypeError)


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
    footer = {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint, "receipt": asdict(receipt)}
    schema = pa.schema(fields, metadata={_FOOTER: json.dumps(footer)})
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def read_footer(store: Store, path: str) -> Footer | None:
    """The footer of a file, or None where the file is damaged or not ours."""
    try:
        with store.open(path) as file:
            return _footer(pq.ParquetFile(file).schema_arrow)
    except _UNREADABLE:
        return None


def read_columns(
    store: Store, stage: str, partitions: Sequence[Partition], fingerprint: str, columns: Sequence[str]
) -> dict[str, Tensor]:
    """These columns of all partitions, in the order of the sample ids, and nothing else of the files.

    Raises:
        MissingArtifact: where a partition has no file.
        FingerprintMismatch: where a file is damaged, of another run, or lacks rows.
    """
    parts = [_read_one(store, f"{stage}/{part.file_name}", part, fingerprint, columns) for part in partitions]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def read_attack_records(store: Store, partitions: Sequence[Partition], fingerprint: str) -> AttackRecords:
    """All rows of the attack stage, without images; errors as in `read_columns`."""
    names = {
        "sample_ids_N": "sample_id",
        "labels_N": "label",
        "std_clean_NK": "std_clean",
        "rob_clean_NK": "rob_clean",
        "rob_attacked_NK": "rob_attacked",
        "log_one_minus_margin_N": "log_one_minus_margin",
        "std_broken_N": "std_broken",
        "rob_broken_N": "rob_broken",
    }
    values = read_columns(store, "attack", partitions, fingerprint, list(names.values()))
    return AttackRecords(**{field: values[column] for field, column in names.items()})


def read_evaluate_records(
    store: Store, partitions: Sequence[Partition], fingerprint: str, attacks: Sequence[str]
) -> EvaluateRecords:
    """All rows of the evaluate stage, without images; errors as in `read_columns`."""
    survived = [f"{SURVIVED}{attack}" for attack in attacks]
    columns = ["sample_id", "label", "mixed_clean", "mixed_attacked", "robust", *survived]
    values = read_columns(store, "evaluate", partitions, fingerprint, columns)
    return EvaluateRecords(
        sample_ids_N=values["sample_id"],
        labels_N=values["label"],
        mixed_clean_NK=values["mixed_clean"],
        mixed_attacked_NK=values["mixed_attacked"],
        robust_N=values["robust"],
        survived={attack: values[f"{SURVIVED}{attack}"] for attack in attacks},
    )


def _read_one(
    store: Store, path: str, partition: Partition, fingerprint: str, columns: Sequence[str]
) -> dict[str, Tensor]:
    if not store.exists(path):
        raise MissingArtifact(f"{store.address(path)} does not exist")
    try:
        with store.open(path) as file:
            parquet = pq.ParquetFile(file)
            footer = _footer(parquet.schema_arrow)
            table = parquet.read(columns=list(columns))
    except _UNREADABLE as error:
        raise FingerprintMismatch(f"{store.address(path)} is damaged ({error}); delete it and run again") from error
    check_footer(store.address(path), footer, fingerprint)
    values = {name: _to_tensor(table.column(name), table.schema.field(name)) for name in columns}
    expected = torch.arange(partition.start, partition.stop)
    if "sample_id" in values and not torch.equal(values["sample_id"], expected):
        raise FingerprintMismatch(f"{store.address(path)} does not hold {partition}; delete it and run again")
    return values


def check_footer(address: str, footer: Footer, fingerprint: str) -> None:
    """Refuse a file of another schema or run.

    Raises:
        FingerprintMismatch: with both values and what to do.
    """
    if footer.schema_version != SCHEMA_VERSION:
        raise FingerprintMismatch(
            f"{address} has schema version {footer.schema_version}; this release reads {SCHEMA_VERSION}"
        )
    if footer.fingerprint != fingerprint:
        raise FingerprintMismatch(
            f"{address} belongs to fingerprint {footer.fingerprint}, this run is {fingerprint}: the weights, the data "
            "or the parameters differ from those of its rows. Give the run another name, or delete that file"
        )


def _footer(schema: Any) -> Footer:
    content = json.loads(schema.metadata[_FOOTER])
    return Footer(content["fingerprint"], content["schema_version"], Receipt(**content["receipt"]))


def _to_arrow(values: Tensor) -> Any:
    flat = values.detach().cpu().contiguous().reshape(-1).numpy()
    if values.dim() == 1:
        return pa.array(flat)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values[0].numel())


def _to_tensor(column: Any, field: Any) -> Tensor:
    shape = json.loads(field.metadata[b"shape"])
    array = column.combine_chunks()
    if shape:
        array = array.flatten()
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return torch.from_numpy(values.copy()).reshape(-1, *shape)

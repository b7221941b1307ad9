"""`search/candidates.parquet`: every candidate that a search has tried, at every beta, one row each."""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..selection.choice import Exploration, Selection


def candidates_table(exploration: Exploration, fingerprint: str) -> bytes:
    """The file, a row group for each part of the search and beta: readers of one beta skip the others."""
    sink = io.BytesIO()
    tables = (table for part in exploration.parts for table in _tables(part))
    first = next(tables).replace_schema_metadata({"fingerprint": fingerprint})
    with pq.ParquetWriter(sink, first.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table.replace_schema_metadata(first.schema.metadata))
    return sink.getvalue()


def _tables(selection: Selection) -> Iterator[pa.Table]:
    """One a beta."""
    grid = selection.grid
    mesh = np.meshgrid(grid.scales, grid.powers, grid.biases, indexing="ij")
    n_rows = mesh[0].size
    for i, beta in enumerate(grid.betas):
        log_cutoffs = selection.log_one_minus_cutoffs[i]
        cutoffs = -torch.expm1(log_cutoffs)
        columns: dict[str, Any] = {
            "beta": np.full(n_rows, beta),
            **{name: axis.reshape(-1) for name, axis in zip(("scale", "power", "bias"), mesh, strict=True)},
            "objective": _flat(selection.objectives[i].masked_fill(selection.undeployable[i], math.nan)),
            "kept": _flat(selection.kept[i]),
            "log_one_minus_cutoff": _flat(log_cutoffs),
            "alpha": _flat(1 / (1 + cutoffs)),
            "one_minus_alpha": _flat(cutoffs / (1 + cutoffs)),
            "feasible": _flat(~selection.infeasible[i]),
            "deployable": _flat(~selection.undeployable[i]),
            "clamp": pa.repeat(grid.clamp, n_rows).dictionary_encode(),
            "ln_k": pa.repeat(pa.scalar(grid.ln_k, pa.int64()), n_rows),
            "refinement": np.full(n_rows, grid.refinement),
        }
        yield pa.table(columns)


def _flat(values: torch.Tensor) -> Any:
    return values.reshape(-1).numpy()

"""What the stages leave for each other: Parquet tables <-> tensors, and the selected parameters as JSON.

Shapes: N images of the run, K classes. One row an image, `sample_id` its index in the split.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..config.config_file import require_plain
from ..selection.choice import Choice

if TYPE_CHECKING:  # what only looks at a run's files does without PyTorch
    from torch import Tensor

    from ..mixing.clamps import Clamp
    from ..selection.exploration import Exploration, Selection


@dataclass(frozen=True)
class AttackRecords:
    """The attack stage's rows: what Algorithm 1 and every closed form need, without any image."""

    sample_ids_N: Tensor  # int64
    labels_N: Tensor  # int64
    std_clean_NK: Tensor  # float32 logits of std on the clean image
    std_attacked_NK: Tensor  # float32 logits of std on the image that its own attack ended on
    rob_clean_NK: Tensor  # float32 raw logits of rob on the clean image
    rob_attacked_NK: Tensor  # float32 raw logits of rob on the minimum-margin image
    log_one_minus_margin_N: Tensor  # float64, log(1 - signed margin) of LayerNormed rob on the minimum-margin image
    std_broken_N: Tensor  # bool: std wrong on the clean image or broken by its own APGD-CE + APGD-T
    rob_broken_N: Tensor  # bool: LayerNormed rob broken by MMAA (or already wrong on the clean image)


@dataclass(frozen=True)
class EvaluateRecords:
    """The evaluate stage's rows: the mixed classifier under the adaptive attack."""

    sample_ids_N: Tensor  # int64
    labels_N: Tensor  # int64
    mixed_clean_NK: Tensor  # float32 logits of the mixed classifier on the clean image
    mixed_attacked_NK: Tensor  # float32 logits on the stored attacked image
    robust_N: Tensor  # bool: right on the clean image and on everything that any attack tried
    survived: dict[str, Tensor]  # "warm-start", then each attack by name, in order -> bool (N,): still right after it

    def first(self, n: int) -> EvaluateRecords:
        """The rows of the first n images."""
        survived = {attack: alive_N[:n] for attack, alive_N in self.survived.items()}
        rows = {name: values[:n] for name, values in vars(self).items() if name != "survived"}
        return EvaluateRecords(**rows, survived=survived)


@dataclass(frozen=True)
class SearchRound:
    """One round of attacking the choices and choosing again."""

    round: int  # from 1
    fingerprint: str  # of its rows
    attacked: tuple[Choice, ...]  # one a beta
    kept: tuple[int, ...]  # of each, measured by the round, of `of` images that rob keeps
    of: int
    n_forward: int
    n_backward: int
    evaluated: str = ""  # fingerprint of the evaluation whose images it took in; empty where it attacked
    tried: tuple[int, ...] = ()  # images that each of them was attacked on

    def to_json(self) -> dict[str, Any]:
        """As in `search/selected.json`."""
        return {**asdict(self), "attacked": [choice.to_json() for choice in self.attacked]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SearchRound:
        """The round as it was stored."""
        attacked = tuple(Choice.from_json(choice) for choice in content["attacked"])
        counts = {name: tuple(content[name]) for name in ("kept", "tried")}
        return cls(**{**content, "attacked": attacked, **counts})


@dataclass(frozen=True)
class SearchResult:
    """`search/selected.json` as a whole."""

    criterion: str
    clamp: Clamp  # of the deployed entry, as is ln_k
    ln_k: int | None
    deployed_beta: float
    surrogate_alpha: float  # alpha_d of f_aux
    entries: tuple[Choice, ...]  # one a beta, largest beta first
    n_candidates: int
    n_undeployable: int  # candidates that float32 could not deploy
    notes: tuple[str, ...]  # plain sentences: assumption violations, edges, criteria that differ
    rounds: tuple[SearchRound, ...] = ()

    def deployed(self) -> Choice:
        """The entry of `deployed_beta`."""
        return self.by_beta()[self.deployed_beta]

    def by_beta(self) -> dict[float, Choice]:
        """The entry of each beta that has one."""
        return {entry.beta: entry for entry in self.entries}

    def with_entries(self, held: Mapping[float, Choice]) -> SearchResult:
        """The same with these betas' entries."""
        return replace(self, entries=tuple(held.get(entry.beta, entry) for entry in self.entries))

    def to_json(self) -> dict[str, Any]:
        """What `search/selected.json` holds as its `result`."""
        entries, rounds = ([part.to_json() for part in parts] for parts in (self.entries, self.rounds))
        return {**asdict(self), "entries": entries, "rounds": rounds}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SearchResult:
        """The result as it was stored."""
        entries = tuple(Choice.from_json(entry) for entry in content["entries"])
        rounds = tuple(SearchRound.from_json(round_) for round_ in content["rounds"])
        notes = tuple(content["notes"])
        require_plain(cls, content)
        return cls(**{**content, "entries": entries, "notes": notes, "rounds": rounds})


@dataclass(frozen=True)
class Receipt:
    """What a worker reports of a finished partition; also kept in the file's footer."""

    stage: str  # "attack" or "evaluate"
    partition: int
    start: int
    stop: int
    clean_correct: int  # of rob in the attack stage, of the mixture in the evaluate stage
    robust: int
    seconds: float  # of one worker
    n_forward: int
    n_backward: int
    node: str
    device: str = "cpu"  # or the accelerator's name
    n_devices: float = 1.0  # cores or accelerators that the worker held; below 1 where workers share one
    precision: str = "std fp32, rob fp32"  # of the gradients, as chosen on this device
    rows: int = 0  # of every pass; fewer once memory has run out
    float32_rows: int = 0  # of the passes in float32 beside coarser ones, and of the judge's
    repeatable: bool = True  # a pass over the same images gave the same bits twice
    finished: float = 0.0  # when, in seconds since 1970
    classifier: str = ""  # "rob" or "mixed": whose counts these are
    sha256: str = field(
        default="", compare=False
    )  # of the whole file; told by its writer and kept in the manifest, since no file can hold its own
    n_bytes: int = field(default=0, compare=False)  # of the whole file, likewise

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Receipt:
        """The receipt as it was stored; a later release of the same schema may have said more.

        Raises:
            ValueError, TypeError: where it is none.
        """
        values = {name: value for name, value in content.items() if name in cls.__dataclass_fields__}
        require_plain(cls, values)
        if not math.isfinite(values["seconds"] + values.get("finished", 0.0)):
            raise ValueError("its times are not finite")
        return cls(**values)

    @property
    def n_images(self) -> int:
        return self.stop - self.start


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
        cutoffs = -log_cutoffs.expm1()
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
        }
        yield pa.table(columns)


def _flat(values: Tensor) -> Any:
    return values.reshape(-1).numpy()

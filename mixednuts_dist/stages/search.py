"""The search stage: Algorithm 1 over the cached logits, for every beta at once."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..config import RunConfig, SearchConfig, digest, grid_values
from ..data.records import AttackRecords, SearchResult, SelectedParameters
from ..data.tables import read_attack_records
from ..distributed.cluster import RaySession, connected
from ..distributed.tuning import SearchInputs, SlabTask, delete_slabs, tune_slabs
from ..errors import FingerprintMismatch, InvalidInputError, MissingArtifact
from ..mixing.candidates import CandidateGrid
from ..mixing.prediction import CachedLogits, compare_criteria, predicted_outcomes
from ..mixing.selection import search_grid, surrogate_alpha
from ..mixing.selection_result import SelectedCandidate, Selection
from .adoption import adopt_attack
from .progress import Progress, Silent
from .runs import Run, open_run, require_complete, stage_clock

SELECTED = "search/selected.json"
CANDIDATES = "search/candidates.parquet"


def run(config: RunConfig, *, session: RaySession | None = None, progress: Progress | None = None) -> SearchResult:
    """Search s, p, c and alpha, unless this very search has been done; returns what it selected.

    Raises:
        MissingArtifact: where the attack stage has not finished.
        InvalidInputError: where no candidate is feasible, or no attacked image is classified correctly.
    """
    opened = open_run(config)
    adopt_attack(opened)
    return complete(opened, session, progress or Silent())


def complete(opened: Run, session: RaySession | None, progress: Progress) -> SearchResult:
    """The stage on an opened run; errors as in `run`."""
    require_complete(opened, "attack", opened.attack_fingerprint)
    if opened.store.exists(SELECTED):
        result = read_search_result(opened)
        progress.stage_finished("search", f"nothing to do: {_headline(result)}")
        return result
    with stage_clock(opened.store, "search"):
        result = _search(opened, session)
    progress.stage_finished("search", _headline(result))
    return result


def read_search_result(opened: Run) -> SearchResult:
    """`search/selected.json`.

    Raises:
        MissingArtifact: where the search has not been run.
        FingerprintMismatch: where the file is damaged or of another run.
    """
    address = opened.store.address(SELECTED)
    if not opened.store.exists(SELECTED):
        raise MissingArtifact(f"{address} does not exist. Run: mixednuts search with the same configuration")
    try:
        content = json.loads(opened.store.read(SELECTED))
        entries = tuple(
            SelectedParameters(**{**entry, "on_grid_edge": tuple(entry["on_grid_edge"])})
            for entry in content["result"]["entries"]
        )
        result = SearchResult(**{**content["result"], "entries": entries, "notes": tuple(content["result"]["notes"])})
        fingerprint = content["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise FingerprintMismatch(f"{address} is damaged ({error}); delete it and run again") from error
    if fingerprint != _fingerprint(opened):
        raise FingerprintMismatch(
            f"{address} belongs to fingerprint {fingerprint}, this run is {_fingerprint(opened)}; "
            "delete it and search again"
        )
    return result


def _fingerprint(opened: Run) -> str:
    return digest({"attack": opened.attack_fingerprint, "search": opened.config.search.model_dump(mode="json")})


def _search(opened: Run, session: RaySession | None) -> SearchResult:
    search = opened.config.search
    records = read_attack_records(opened.store, opened.partitions, opened.attack_fingerprint)
    inputs = _inputs(records)
    criterion = inputs.criterion(search.criterion, search.clamp, search.ln_k)
    task = SlabTask(opened.store.uri, _fingerprint(opened), search.criterion, search.clamp, search.ln_k, _grid(search))
    with connected(session):
        log_cutoffs, counts = tune_slabs(inputs, task)
    selection = Selection.of(criterion, task.grid, ln_k=search.ln_k, log_one_minus_cutoffs=log_cutoffs, counts=counts)
    notes = (*selection.notes, *_paper_notes(search, inputs, task.grid, records, selection))
    result = _result(search, records, selection, notes)
    opened.store.write(CANDIDATES, _candidates_table(selection, task.fingerprint))
    content = {"run_id": opened.config.run_id(), "fingerprint": task.fingerprint, "result": asdict(result)}
    opened.store.write(SELECTED, json.dumps(content, indent=1, allow_nan=False).encode())
    delete_slabs(opened.store)
    return result


def _inputs(records: AttackRecords) -> SearchInputs:
    return SearchInputs(
        records.labels_N.numpy(),
        records.std_clean_NK.numpy(),
        records.rob_clean_NK.numpy(),
        records.rob_attacked_NK.numpy(),
    )


def _grid(search: SearchConfig) -> CandidateGrid:
    return CandidateGrid.checked(
        scales=grid_values(search.scales),
        powers=grid_values(search.powers),
        biases=grid_values(search.biases),
        betas=search.all_betas(),
    )


def _paper_notes(
    search: SearchConfig, inputs: SearchInputs, grid: CandidateGrid, records: AttackRecords, exact: Selection
) -> tuple[str, ...]:
    """Where the paper's criterion would have chosen a less accurate mixture on the same grid."""
    if search.criterion != "exact":
        return ()
    deployed = replace(grid, betas=(search.beta,))
    try:
        paper = search_grid(inputs.criterion("paper", search.clamp, search.ln_k), deployed, search.ln_k)
    except InvalidInputError as error:
        return (f"beta {search.beta}: the paper's criterion finds nothing: {error}",)
    std_pred = records.std_clean_NK.argmax(dim=1)
    return compare_criteria(
        paper, exact, rob_clean_BK=records.rob_clean_NK, labels_B=records.labels_N, std_pred_B=std_pred
    )


def _result(search: SearchConfig, records: AttackRecords, selection: Selection, notes: Sequence[str]) -> SearchResult:
    chosen = [candidate for candidate in selection.chosen if candidate is not None]
    if not any(candidate.beta == search.beta for candidate in chosen):
        selection.for_beta(search.beta)  # raises, and says why nothing is left at the deployed beta
    surrogate_beta = search.beta if search.surrogate_beta is None else search.surrogate_beta
    survived = records.rob_attacked_NK.argmax(dim=1) == records.labels_N
    cached = CachedLogits(
        rob_clean_BK=records.rob_clean_NK,
        rob_attacked_BK=records.rob_attacked_NK,
        labels_B=records.labels_N,
        std_pred_B=records.std_clean_NK.argmax(dim=1),
    )
    return SearchResult(
        criterion=search.criterion,
        clamp=search.clamp,
        ln_k=search.ln_k,
        deployed_beta=search.beta,
        surrogate_alpha=surrogate_alpha(records.rob_attacked_NK[survived], surrogate_beta),
        entries=tuple(_entry(cached, candidate) for candidate in chosen),
        n_candidates=selection.objectives[0].numel(),
        n_undeployable=selection.n_undeployable,
        notes=_notes(search, notes),
    )


def _notes(search: SearchConfig, notes: Sequence[str]) -> tuple[str, ...]:
    """What the search remarks about the deployed beta or about all of them; the other betas are in the table."""
    return tuple(note for note in notes if not note.startswith("beta ") or note.startswith(f"beta {search.beta}:"))


def _entry(cached: CachedLogits, candidate: SelectedCandidate) -> SelectedParameters:
    clean, robust = predicted_outcomes(candidate, cached)
    return SelectedParameters(
        beta=candidate.beta,
        scale=candidate.scale,
        power=candidate.power,
        bias=candidate.bias,
        alpha=candidate.alpha,
        one_minus_alpha=candidate.one_minus_alpha,
        cutoff=candidate.cutoff,
        objective=candidate.objective,
        clean_correct=int(clean.sum()),
        robust_correct_bound=int(robust.sum()),
        total=len(cached.labels_B),
        on_grid_edge=candidate.on_grid_edge,
    )


def _candidates_table(selection: Selection, fingerprint: str) -> bytes:
    """Every candidate at every beta, one row each."""
    grid = selection.grid
    axes = (grid.betas, grid.scales, grid.powers, grid.biases)
    mesh = np.meshgrid(*axes, indexing="ij")
    columns: dict[str, Any] = dict(zip(("beta", "scale", "power", "bias"), mesh, strict=True))
    columns["objective"] = selection.objectives.numpy()
    columns["log_one_minus_cutoff"] = selection.log_one_minus_cutoffs.numpy()
    cutoff = -torch.expm1(selection.log_one_minus_cutoffs).numpy()
    columns["alpha"] = 1 / (1 + cutoff)
    columns["one_minus_alpha"] = cutoff / (1 + cutoff)
    columns["feasible"] = ~selection.infeasible.numpy()
    columns["deployable"] = ~selection.undeployable.numpy()
    table = pa.table({name: values.reshape(-1) for name, values in columns.items()})
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"fingerprint": fingerprint}), sink, compression="zstd")
    return sink.getvalue()


def _headline(result: SearchResult) -> str:
    chosen = result.deployed()
    alpha = f"{chosen.alpha:.4g}" if chosen.one_minus_alpha > 1e-3 else f"1 - {chosen.one_minus_alpha:.3g}"
    return (
        f"beta {chosen.beta:g}: s {chosen.scale:.4g}, p {chosen.power:.4g}, c {chosen.bias:.4g}, alpha {alpha}; "
        f"predicts {chosen.clean_correct} of {chosen.total} clean images right"
    )

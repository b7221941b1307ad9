"""The search stage: Algorithm 1 over the cached logits, for every beta at once."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ..config import RunConfig, SearchConfig, digest, grid_values
from ..distributed.cluster import RaySession
from ..distributed.optuna_rounds import OptunaRounds
from ..distributed.slabs import SearchInputs, SearchTask, delete_slabs
from ..errors import DamagedFile, FingerprintMismatch, InvalidInputError, MissingArtifact
from ..selection.candidates import CandidateGrid
from ..selection.criteria import Criterion
from ..selection.exploration import Choice, Exploration, Explored, Pair, Proposer, Subgrid
from ..selection.prediction import CachedLogits, PredictedShare, compare_candidates, trade_off_point
from ..selection.refinement import GridRounds
from ..selection.selection import score_candidates, search_grid, surrogate_alpha
from ..storage.records import AttackRecords, SearchResult, SearchRound, SelectedParameters
from ..storage.tables import read_attack_records
from .adoption import adopt_attack
from .candidates_table import candidates_table
from .point_sets import points_criterion
from .progress import Progress, Silent
from .rounds import Points, Rounds, eased
from .runs import Run, open_run, require_complete, stage_clock

logger = logging.getLogger(__name__)

SELECTED = "search/selected.json"
CANDIDATES = "search/candidates.parquet"
_GRID_KEYS = ("clamp", "ln_k", "round")  # the rows that agree in them are one grid


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
    _ = opened.config.required_std
    require_complete(opened, "attack", opened.attack_fingerprint)
    if opened.store.exists(SELECTED):
        try:
            result = read_search_result(opened)
        except DamagedFile as error:
            logger.warning("%s", error)
        else:
            progress.stage_finished("search", f"nothing to do: {_headline(result)}")
            return result
    with stage_clock(opened.store, "search"):
        result = _search(opened, session, progress)
    progress.stage_finished("search", _headline(result))
    return result


def read_search_result(opened: Run) -> SearchResult:
    """`search/selected.json`.

    Raises:
        MissingArtifact: where the search has not been run.
        DamagedFile: where the file is not what was written; it is removed.
        FingerprintMismatch: where the file is of another run.
    """
    address = opened.store.address(SELECTED)
    if not opened.store.exists(SELECTED):
        raise MissingArtifact(f"{address} does not exist. Run: mixednuts search with the same configuration")
    try:
        content = json.loads(opened.store.read(SELECTED))
        if content.pop("digest") != digest(content):
            raise ValueError("its content has changed")
        entries = tuple(_entry_of(entry) for entry in content["result"]["entries"])
        rounds = tuple(_round_of(round_) for round_ in content["result"].get("rounds", ()))
        lists = {"entries": entries, "notes": tuple(content["result"]["notes"]), "rounds": rounds}
        result = SearchResult(**{**content["result"], **lists})
        fingerprint = content["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        opened.store.delete(SELECTED)
        raise DamagedFile(f"{address} is damaged ({error}) and was removed: `mixednuts run` searches again") from error
    if fingerprint != _fingerprint(opened):
        raise FingerprintMismatch(
            f"{address} belongs to fingerprint {fingerprint}, this run is {_fingerprint(opened)}; "
            "delete it and search again"
        )
    return result


def read_candidates(opened: Run, beta: float) -> list[dict[str, Any]]:
    """The grid that the choice at `beta` is from: rows of `search/candidates.parquet` with objective, cutoff and alpha.

    Raises:
        MissingArtifact, FingerprintMismatch: as in `read_search_result`.
    """
    address = opened.store.address(CANDIDATES)
    with opened.store.open(CANDIDATES) as file:
        try:
            table = pq.read_table(file, filters=[("beta", "==", beta)], page_checksum_verification=True)
            fingerprint = table.schema.metadata[b"fingerprint"].decode()
        except (pa.ArrowException, OSError, KeyError, TypeError) as error:
            opened.store.delete(CANDIDATES)
            opened.store.delete(SELECTED)
            raise DamagedFile(
                f"{address} is damaged ({error}) and was removed: `mixednuts run` searches again"
            ) from error
    if fingerprint != _fingerprint(opened):
        raise FingerprintMismatch(
            f"{address} belongs to fingerprint {fingerprint}, this run is {_fingerprint(opened)}; "
            f"delete it and {SELECTED}, and search again"
        )
    chosen = next((entry for entry in read_search_result(opened).entries if entry.beta == beta), None)
    rows: list[dict[str, Any]] = table.to_pylist()
    return [row for row in rows if chosen and all(row[key] == getattr(chosen, key) for key in _GRID_KEYS)]


def _entry_of(content: dict[str, Any]) -> SelectedParameters:
    """An entry of the file; JSON has no tuples."""
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return SelectedParameters(**{**content, **lists})


def _round_of(content: dict[str, Any]) -> SearchRound:
    attacked = tuple(_entry_of(entry) for entry in content["attacked"])
    return SearchRound(**{**content, "attacked": attacked, "kept": tuple(content["kept"])})


def _fingerprint(opened: Run) -> str:
    return digest({"attack": opened.attack_fingerprint, "search": opened.config.search.model_dump(mode="json")})


def _search(opened: Run, session: RaySession | None, progress: Progress) -> SearchResult:
    config, search = opened.config, opened.config.search
    records = read_attack_records(opened.store, opened.partitions, opened.attack_fingerprint)
    inputs = _inputs(records)
    inputs.criterion(search.criterion, search.clamp, search.ln_k)  # refuses what cannot be searched, before Ray starts
    task = SearchTask(opened.store.uri, _fingerprint(opened), search.criterion)
    with RaySession() as own:
        used = session or own
        last: list[Exploration] = []

        def choose(points: Points | None) -> SearchResult:
            exploration = _explored(search, *_scoring(search, inputs, task, points, records, used), seed=config.seed)
            last[:] = [exploration]
            notes = _paper_notes(search, inputs, records, exploration)
            return _result(search, records, points, exploration, notes)

        if search.rounds and search.criterion == "exact":
            result = Rounds(opened, records, choose).run(used, progress)
        else:
            result = choose(None)
    opened.store.write(CANDIDATES, candidates_table(last[0], task.fingerprint))
    content = {"run_id": config.run_id(), "fingerprint": task.fingerprint, "result": asdict(result)}
    content["digest"] = digest(content)
    opened.store.create(SELECTED, json.dumps(content, indent=1, allow_nan=False).encode())
    delete_slabs(opened.store)
    return read_search_result(opened)  # of two drivers the first one's parameters are deployed, to the last bit


Scores = Callable[[Sequence[Subgrid]], list[tuple[Tensor, Tensor]]]


def _scoring(
    search: SearchConfig,
    inputs: SearchInputs,
    task: SearchTask,
    points: Points | None,
    records: AttackRecords,
    session: RaySession,
) -> tuple[dict[Pair, Criterion], Scores]:
    """The criterion of each clamp and width, and how subgrids are scored: by Ray Tune, or here where they are sets."""
    if points is None or len(points.image_P) == len(records.labels_N):
        from ..distributed.tuning import SlabTuner  # imports Ray Tune

        session.ensure()
        criteria = {pair: inputs.criterion(search.criterion, *pair) for pair in search.pairs()}
        return criteria, SlabTuner(inputs, task).scores
    std_pred_N, robust_N = records.std_clean_NK.argmax(dim=1), ~records.rob_broken_N
    sets = {
        (clamp, ln_k): points_criterion(
            points, records.labels_N, records.rob_clean_NK, std_pred_N, robust_N, clamp=clamp, ln_k=ln_k
        )
        for clamp, ln_k in search.pairs()
    }
    return dict(sets), lambda subgrids: [score_candidates(sets[subgrid.pair], subgrid.grid) for subgrid in subgrids]


def _explored(search: SearchConfig, criteria: dict[Pair, Criterion], scores: Scores, *, seed: int) -> Exploration:
    """Round after round of the grid, until the proposer has had enough."""
    exploration = Exploration(search.pairs())
    proposer = _proposer(search, seed, maximised=criteria[exploration.pairs[0]].maximised)
    while subgrids := proposer.propose(exploration):
        found = zip(subgrids, scores(subgrids), strict=True)
        exploration = exploration.with_parts(
            Explored.of(subgrid, criteria[subgrid.pair], *scored) for subgrid, scored in found
        )
    return exploration


def _proposer(search: SearchConfig, seed: int, *, maximised: bool) -> Proposer:
    if search.sampler == "grid":
        return GridRounds(_grid(search), search.beta, search.refine)
    return OptunaRounds(
        _grid(search), search.pairs(), beta=search.beta, n_trials=search.n_trials, seed=seed, maximised=maximised
    )


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
    search: SearchConfig, inputs: SearchInputs, records: AttackRecords, exploration: Exploration
) -> tuple[str, ...]:
    """Where the paper's criterion would have chosen a less accurate mixture on the configured grid."""
    exact = exploration.choice(search.beta)
    if search.criterion != "exact" or exact is None:
        return ()
    deployed = replace(_grid(search), betas=(search.beta,))
    try:
        paper = search_grid(inputs.criterion("paper", search.clamp, search.ln_k), deployed, search.ln_k)
    except InvalidInputError as error:
        return (f"beta {search.beta}: the paper's criterion finds nothing: {error}",)
    std_pred = records.std_clean_NK.argmax(dim=1)
    note = compare_candidates(
        paper.for_beta(search.beta), exact.candidate, records.rob_clean_NK, records.labels_N, std_pred
    )
    return (note,) if note else ()


def _result(
    search: SearchConfig,
    records: AttackRecords,
    points: Points | None,
    exploration: Exploration,
    paper_notes: Sequence[str],
) -> SearchResult:
    choices = {beta: exploration.choice(beta) for beta in search.all_betas()}
    deployed = choices[search.beta]
    first = exploration.parts[0].selection
    if deployed is None:
        first.for_beta(search.beta)  # raises, and says why nothing is left at the deployed beta
    assert deployed is not None
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
        clamp=deployed.candidate.clamp,
        ln_k=deployed.candidate.ln_k,
        deployed_beta=search.beta,
        surrogate_alpha=surrogate_alpha(records.rob_attacked_NK[survived], surrogate_beta),
        entries=tuple(_entry(cached, points, choice) for choice in choices.values() if choice is not None),
        n_candidates=sum(part.selection.objectives[0].numel() for part in exploration.parts),
        n_undeployable=sum(part.selection.n_undeployable for part in exploration.parts),
        notes=(*_notes(search, exploration.notes(choices)), *paper_notes),
    )


def _notes(search: SearchConfig, notes: Sequence[str]) -> tuple[str, ...]:
    """What the search remarks about the deployed beta or about all of them; the other betas are in the table."""
    return tuple(note for note in notes if not note.startswith("beta ") or note.startswith(f"beta {search.beta}:"))


def _entry(cached: CachedLogits, points: Points | None, choice: Choice) -> SelectedParameters:
    candidate = choice.candidate
    if points is not None:
        cached = replace(cached, rob_attacked_BK=points.hardest(cached.labels_B, candidate.transform()))
    point = trade_off_point(candidate, cached)
    entry = SelectedParameters(
        beta=candidate.beta,
        scale=candidate.scale,
        power=candidate.power,
        bias=candidate.bias,
        alpha=candidate.alpha,
        one_minus_alpha=candidate.one_minus_alpha,
        cutoff=candidate.cutoff,
        objective=candidate.objective,
        clean_correct=point.clean.correct,
        robust_correct_bound=point.robust.correct,
        total=len(cached.labels_B),
        on_grid_edge=candidate.on_grid_edge,
        clamp=candidate.clamp,
        ln_k=candidate.ln_k,
        round=choice.part.subgrid.round,
        clean_interval=_interval(point.clean),
        robust_interval=_interval(point.robust),
    )
    return entry if points is None else eased(entry, cached)


def _interval(share: PredictedShare) -> tuple[float, float]:
    return share.low, share.high


def _headline(result: SearchResult) -> str:
    chosen = result.deployed()
    last = result.rounds[-1] if result.rounds else None
    measured = dict(zip(last.attacked, last.kept, strict=True)).get(chosen) if last else None
    rounds = f"; {len(result.rounds)} round{'s' * (len(result.rounds) > 1)} of attack" if last else ""
    if last and measured is not None:
        rounds += f", which left {measured} of rob's {last.of} robust images"
    alpha = f"{chosen.alpha:.4g}" if chosen.one_minus_alpha > 1e-3 else f"1 - {chosen.one_minus_alpha:.3g}"
    return (
        f"beta {chosen.beta:g}: s {chosen.scale:.4g}, p {chosen.power:.4g}, c {chosen.bias:.4g}, alpha {alpha}; "
        f"predicts {chosen.clean_correct} of {chosen.total} clean images right{rounds}"
    )

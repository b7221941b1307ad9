"""The search stage: Algorithm 1 over the cached logits, for every beta at once."""

import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..config.run_config import RunConfig
from ..distributed.executor import Executor, executing
from ..errors import DamagedFile, FingerprintMismatch
from ..selection.grid import kept_images
from ..storage.damage import set_aside_if_damaged
from ..storage.records import SearchResult
from ..storage.tables import read_columns
from .choosing import CANDIDATES, Choosing, attacks_its_choice, needed_stage
from .progress import RunProgress
from .rounds import Rounds
from .runs import (
    SELECTED,
    Run,
    evaluate_fingerprint,
    open_run,
    read_search_result,
    require_complete,
    search_fingerprint,
    stage_clock,
)
from .stage import stage_of

logger = logging.getLogger(__name__)

MOST_EVALUATIONS = 2  # evaluations whose images may start another round
_GRID_KEYS = ("clamp", "ln_k")  # rows that agree in these are from the same grid


def run(config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> SearchResult:
    """Search s, p, c and alpha, unless the run has a result of the same search; returns what was selected.

    Raises:
        MissingArtifact: where the attack stage has not finished.
        InvalidInputError: where no candidate is feasible, or no attacked image is classified correctly.
    """
    opened = open_run(config)
    return complete(opened, executor, progress or RunProgress())


def complete(opened: Run, executor: Executor | None, progress: RunProgress) -> SearchResult:
    """The stage on an opened run; errors as in `run`."""
    _ = opened.config.required_std
    opened = opened.searched
    require_complete(opened, "attack", opened.attack_fingerprint)
    if (needed := needed_stage(opened.config.search)) is not None:
        require_complete(opened, needed, stage_of(opened.config, needed).fingerprint(opened))
    if opened.store.exists(SELECTED) and opened.store.exists(CANDIDATES):
        try:
            result = read_search_result(opened)
        except DamagedFile as error:
            logger.warning("%s", error)
            set_aside_if_damaged(opened.store, SELECTED)
        else:
            progress.stage_finished("search", f"nothing to do: {_headline(result)}")
            return result
    with stage_clock(opened.store, "search"):
        result = _search(opened, executor, progress)
    progress.stage_finished("search", _headline(result))
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
            raise DamagedFile(
                f"{address} is damaged ({error}): `mixednuts run` quarantines it and searches again", address
            ) from error
    if fingerprint != search_fingerprint(opened):
        raise FingerprintMismatch(
            f"{address} has the content hash {fingerprint}, this run has {search_fingerprint(opened)}; "
            f"delete it and {SELECTED}, and search again"
        )
    chosen = next((entry for entry in read_search_result(opened).entries if entry.beta == beta), None)
    rows: list[dict[str, Any]] = table.to_pylist()
    return [row for row in rows if chosen and all(row[key] == getattr(chosen, key) for key in _GRID_KEYS)]


def _search(opened: Run, executor: Executor | None, progress: RunProgress) -> SearchResult:
    with executing(executor, opened.config.compute) as used:
        choosing = Choosing(opened, used)
        search = opened.config.search
        if attacks_its_choice(search):
            result = Rounds(opened, choosing.records, choosing).run(used, progress)
        else:
            result = choosing(None)
    choosing.store(result, opened.store.create)
    return read_search_result(opened)  # where two drivers search, both deploy what the first has stored


def learn(opened: Run, executor: Executor | None, progress: RunProgress) -> bool:
    """Search once more with the images that the evaluation ended on, if it kept too few.

    False if it kept enough, or where the search ends in the same mixture all the same. Afterwards another choice may be
    deployed, which is then still to be evaluated.
    """
    opened = opened.searched
    search, result = opened.config.search, read_search_result(opened)
    n_evaluations = sum(1 for done in result.rounds if done.evaluated)
    if not attacks_its_choice(search) or n_evaluations >= MOST_EVALUATIONS:
        return False
    kept, n_robust = kept_by_evaluation(opened, result)
    if kept >= kept_images(result.deployed_beta, n_robust):
        return False
    logger.info("the evaluation kept %d of %d; its images start one more round", kept, n_robust)
    with executing(executor, opened.config.compute) as used, stage_clock(opened.store, "search"):
        choosing = Choosing(opened, used)
        learnt = Rounds(opened, choosing.records, choosing).learn(result, used, progress)
    if learnt is None:
        return False
    choosing.store(learnt, opened.store.write)
    progress.stage_finished("search", _headline(learnt))
    return True


def kept_by_evaluation(opened: Run, result: SearchResult) -> tuple[int, int]:
    """Images that rob keeps and the mixture too, as the finished evaluate stage measured it, and those that rob keeps.

    Errors as in `read_columns`.
    """
    given = opened.rows, "evaluate", opened.partitions, evaluate_fingerprint(opened, result), ["robust"]
    first = opened.config.search.first
    robust_N = read_columns(*given)["robust"][:first]
    attacked = opened.rows, "attack", opened.partitions, opened.attack_fingerprint, ["rob_broken"]
    rob_robust_N = ~read_columns(*attacked)["rob_broken"][:first]
    return int((robust_N & rob_robust_N).sum()), int(rob_robust_N.sum())


def _headline(result: SearchResult) -> str:
    chosen = result.deployed()
    measured = {
        entry: f", which left {kept} of rob's {done.of} robust images"
        for done in result.rounds
        for entry, kept in zip(done.attacked, done.kept, strict=True)
    }
    passes = sum(done.n_forward + done.n_backward for done in result.rounds)
    tried = [
        (entry.beta, n)
        for done in result.rounds
        if not done.evaluated
        for entry, n in zip(done.attacked, done.tried, strict=False)
    ]
    n_betas, n_of_one = len(dict(tried)), sum(n for beta, n in tried if beta == chosen.beta)
    rounds = f"; {len(result.rounds)} round{'s' * (len(result.rounds) > 1)} of attack" if result.rounds else ""
    rounds += f" on {n_betas} betas" * (n_betas > 1) + f" in {passes:,} passes" * bool(rounds)
    if n_betas > 1 and n_of_one:
        rounds += f" ({sum(n for _, n in tried) / n_of_one:.2f} times the images attacked of this one)"
    rounds += measured.get(chosen, "")
    alpha = f"{chosen.alpha:.4g}" if chosen.one_minus_alpha > 1e-3 else f"1 - {chosen.one_minus_alpha:.3g}"
    return (
        f"beta {chosen.beta:g}: s {chosen.scale:.4g}, p {chosen.power:.4g}, c {chosen.bias:.4g}, alpha {alpha}; "
        f"predicts {chosen.clean_correct} of {chosen.total} clean images right{rounds}"
    )

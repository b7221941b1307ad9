"""The search stage runs Algorithm 1 over the stored logits, for all betas at once."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..config.run_config import RunConfig
from ..distributed.executor import Executor, executing
from ..selection.grid import kept_images
from ..selection.selection import Selection
from ..storage.damage import signed_json
from ..storage.records import SearchResult
from ..storage.tables import candidates_table, damaged, table_problem
from .choosing import attacks_its_choice, choose, search_rows
from .driver_notes import stage_clock
from .progress import RunProgress
from .rounds import Rounds
from .runs import Run, open_run, require_complete
from .search_result import SELECTED, evaluate_content_hash, read_search_result, search_content_hash

logger = logging.getLogger(__name__)

CANDIDATES = "search/candidates.parquet"
MOST_EVALUATIONS = 2  # maximum number of evaluations whose examples start more refinement rounds


def run(config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> SearchResult:
    """Search s, p, c and alpha, unless the run has a result, and return the selected parameters.

    Raises:
        MissingArtifact: if the attack stage has not finished.
        InvalidInputError: if no candidate is feasible, or no attacked image is classified correctly.
        DamagedFile: if the stored result has changed.
    """
    return complete(open_run(config), executor, progress or RunProgress())


def complete(opened: Run, executor: Executor | None, progress: RunProgress) -> SearchResult:
    """Complete the stage of an opened run; errors as in `run`."""
    _ = opened.config.required_std
    opened = opened.searched
    require_complete(opened, "attack", opened.attack_content_hash)
    if opened.store.exists(SELECTED) and opened.store.exists(CANDIDATES):
        result = read_search_result(opened)
        progress.stage_finished("search", f"nothing to do: {_headline(result)}")
        return result
    with stage_clock(opened.store, "search"), executing(executor, opened.config.compute) as used:
        if attacks_its_choice(opened.config.search):
            rounds = Rounds(opened, used, progress)
            result, selection = rounds.run(), rounds.selection
        else:
            result, selection = choose(opened, search_rows(opened), used)
        _store(opened, result, selection, opened.store.create)
    result = read_search_result(opened)  # if two drivers search, both deploy the result that was stored first
    progress.stage_finished("search", _headline(result))
    return result


def read_candidates(opened: Run, beta: float) -> list[dict[str, Any]]:
    """Return the candidates at `beta` with their objectives and alphas.

    Raises:
        MissingArtifact: if the search has not run.
        DamagedFile: if the file has changed since it was written.
    """
    address, content = opened.store.address(CANDIDATES), opened.store.read(CANDIDATES)
    if problem := table_problem(content):
        raise damaged(address, problem, content)
    rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(content), filters=[("beta", "==", beta)]).to_pylist()
    return rows


def _store(opened: Run, result: SearchResult, selection: Selection, write: Callable[[str, bytes], object]) -> None:
    """Write `search/candidates.parquet`, then `search/selected.json`."""
    opened.store.write(CANDIDATES, candidates_table(selection))
    content_hash = search_content_hash(opened)
    content = {"run_id": opened.config.run_id(), "content_hash": content_hash, "result": asdict(result)}
    write(SELECTED, signed_json(content, indent=1, allow_nan=False))


def learn(opened: Run, executor: Executor | None, progress: RunProgress) -> bool:
    """Search again with the adversarial examples of the evaluation, if too few images remained robust.

    Return True if the run now deploys another mixed classifier, which has to be evaluated.
    """
    opened = opened.searched
    search, result = opened.config.search, read_search_result(opened)
    n_evaluations = sum(1 for done in result.rounds if done.evaluated)
    if not attacks_its_choice(search) or n_evaluations >= MOST_EVALUATIONS:
        return False
    kept, n_robust = kept_by_evaluation(opened, result)
    if kept >= kept_images(result.deployed_beta, n_robust):
        return False
    logger.info("the evaluation kept %d of %d robust images; it starts another refinement round", kept, n_robust)
    with executing(executor, opened.config.compute) as used, stage_clock(opened.store, "search"):
        rounds = Rounds(opened, used, progress)
        learnt = rounds.learn(result)
    if learnt is None:
        return False
    _store(opened, learnt, rounds.selection, opened.store.write)
    progress.stage_finished("search", _headline(learnt))
    return True


def kept_by_evaluation(opened: Run, result: SearchResult) -> tuple[int, int]:
    """Return how many robust images of `rob` remain robust in the evaluation, and how many robust images `rob` has.

    Errors as in `read_columns`.
    """
    (robust_N,) = opened.columns("evaluate", evaluate_content_hash(opened, result), ["robust"]).values()
    (rob_broken_N,) = opened.columns("attack", opened.attack_content_hash, ["rob_broken"]).values()
    robust_N, rob_robust_N = (each_N[: opened.config.search.first] for each_N in (robust_N, ~rob_broken_N))
    return int((robust_N & rob_robust_N).sum()), int(rob_robust_N.sum())


def _headline(result: SearchResult) -> str:
    chosen, passes = result.deployed(), sum(done.n_forward + done.n_backward for done in result.rounds)
    alpha = f"{chosen.alpha:.4g}" if chosen.one_minus_alpha > 1e-3 else f"1 - {chosen.one_minus_alpha:.3g}"
    n = len(result.rounds)
    rounds = f"; {n} refinement round{'s' * (n > 1)} in {passes:,} passes" if n else ""
    return (
        f"beta {chosen.beta:g}: s {chosen.scale:.4g}, p {chosen.power:.4g}, c {chosen.bias:.4g}, alpha {alpha}; "
        f"predicts {chosen.clean_correct} of {chosen.total} clean images right{rounds}"
    )

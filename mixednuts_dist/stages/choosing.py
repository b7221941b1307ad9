"""Score the grid on all stored adversarial examples, choose a candidate for every beta, and predict its accuracies."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..config.keys import SearchConfig
from ..config.register import CRITERIA
from ..distributed.executor import Executor, Scoring
from ..selection.criteria import Criterion
from ..selection.grid import Grid, kept_images
from ..selection.inputs import CachedLogits
from ..selection.prediction import with_predictions
from ..selection.selection import Selection, score_candidates, search_grid, surrogate_alpha
from ..storage.records import SearchResult
from .partitioned import worker_spec
from .runs import Run

SPARE = 0.003  # share of images kept in addition to beta, because the evaluation is stronger than a refinement round


def search_rows(opened: Run) -> CachedLogits:
    """Return the attack stage's rows of the images that the search reads."""
    names = ("label", "std_clean", "rob_clean", "rob_attacked")
    stored = opened.columns("attack", opened.attack_content_hash, names, opened.sample_ids)
    labels_N, std_NK, rob_NK, attacked_NK = stored.values()
    return CachedLogits(rob_NK, attacked_NK, labels_N, std_NK.argmax(dim=1))


def choose(opened: Run, rows: CachedLogits, executor: Executor) -> tuple[SearchResult, Selection]:
    """Search the configured grid, widen it, and choose a candidate for every beta.

    Args:
        rows: from `search_rows`; refinement rounds add `points`.

    Raises:
        InvalidInputError: if no candidate can be used at the deployed beta.
    """
    search, n_more = opened.config.search, len(rows.points or ())
    grid = Grid.configured(search)
    criterion: Criterion = CRITERIA.get(search.criterion).from_rows(rows, clamp=grid.clamp, ln_k=grid.ln_k)
    executor.report(
        f"searching {math.prod(grid.shape[1:]):,} candidates (s, p, c) on the stored logits of "
        f"{len(rows.labels_B):,} images"
        + (f" and {n_more:,} adversarial examples of refinement rounds" if n_more else "")
    )
    if n_more:  # each beta keeps a few more images than required, if `rob` itself is right on that many
        n, most = criterion.n_attacked, criterion.attacked.n_right()
        kept = [max(1, min(most, wanted_images(beta, n))) for beta in grid.betas]
        score: Scoring = partial(score_candidates, criterion, kept=kept)
    else:
        score = _scoring(opened, rows, criterion, executor)
    found = search_grid(criterion, grid, n_widen=search.widen or 0, score=score)
    deployed = found.for_beta(search.beta)
    survived = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
    alpha_d = surrogate_alpha(rows.rob_attacked_BK[survived], search.surrogate_beta)
    chosen = (replace(choice, surrogate_alpha=alpha_d) for choice in found.chosen if choice is not None)
    result = SearchResult(
        criterion=search.criterion,
        clamp=deployed.clamp,
        ln_k=deployed.ln_k,
        deployed_beta=search.beta,
        surrogate_alpha=alpha_d,
        entries=tuple(with_predictions(choice, rows) for choice in chosen),
        n_candidates=found.objectives[0].numel(),
        n_undeployable=found.n_undeployable,
        notes=(*found.notes(search.beta), *_notes(opened, rows, criterion, found.grid)),
    )
    return result, found


def _scoring(opened: Run, rows: CachedLogits, criterion: Criterion, executor: Executor) -> Scoring:
    """Return the function that scores a grid: with the executor (in a Tune job on Ray), or in this process."""
    config, here, on_tune = opened.config, partial(score_candidates, criterion), None
    if config.search.tune:
        on_tune = executor.scoring(worker_spec(opened), config.compute, rows, config.search.criterion)
    # a wider grid is scored here, because a second Tune job takes longer to start
    return lambda grid: here(grid) if on_tune is None or grid.widenings else on_tune(grid)


def _notes(opened: Run, rows: CachedLogits, criterion: Criterion, grid: Grid) -> Iterator[str]:
    """Yield notes on the images that were searched, on the grid, and on what beta promises."""
    search, n_searched, n_images = opened.config.search, len(rows.labels_B), opened.inputs.n_images
    if n_searched < n_images:
        drawn = "drawn at random with the run's seed (search.sample)"
        which = "the first ones (search.first)" if n_searched == search.first else drawn
        yield f"The search read {n_searched:,} of the {n_images:,} images, {which}. Its predictions count only those."
    n_robust = criterion.n_attacked
    if rows.points is not None and (n_right := criterion.attacked.n_right()) < kept_images(search.beta, n_robust):
        yield (
            f"beta {search.beta}: the attack on the mixed classifier found images that fool rob alone. rob is right at "
            f"all adversarial examples of {n_right} of {n_robust} images, and no mixed classifier keeps more."
        )
    if grid.widenings:
        scales, powers, biases = (
            f"{min(axis):.3g} to {max(axis):.3g}" for axis in (grid.scales, grid.powers, grid.biases)
        )
        yield (
            f"The default grid was widened {grid.widenings} time{'s' * (grid.widenings > 1)} because its optimum lay "
            f"on the edge: search.scales reach from {scales}, search.powers from {powers}, search.biases from "
            f"{biases}. search.widen: 0 leaves it as it is."
        )
    if search.rounds and not attacks_its_choice(search):
        yield (
            f"Criterion {search.criterion!r} fixes the margin threshold by beta, so there were no refinement rounds "
            "(search.rounds), and beta holds only at the stored adversarial examples."
        )


def attacks_its_choice(search: SearchConfig) -> bool:
    """Return whether the search has refinement rounds; criteria that fix the threshold by beta have none."""
    inequality: bool = CRITERIA.get(search.criterion).inequality
    return bool(search.rounds) and inequality


def wanted_images(beta: float, n_robust: int) -> int:
    """Return how many robust images of the robust classifier refinement rounds keep, a few more than beta requires.

    >>> wanted_images(0.95, 609), wanted_images(0.95, 38)
    (581, 37)
    """
    return min(n_robust, kept_images(beta, n_robust) + round(SPARE * n_robust))

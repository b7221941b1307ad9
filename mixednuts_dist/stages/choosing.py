"""The search over all known adversarial examples: grid, the choice of every beta, and predictions."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..config.register import CRITERIA, load_extensions
from ..config.run_config import digest
from ..config.search_config import SearchConfig
from ..distributed.executor import Executor, Scoring
from ..distributed.tasks import SearchTask
from ..errors import InvalidInputError
from ..selection.choice import Choice
from ..selection.criteria import Criterion
from ..selection.grid import Grid, kept_images
from ..selection.inputs import CachedLogits
from ..selection.prediction import compare_candidates, with_predictions
from ..selection.selection import Selection, score_candidates, search_grid, surrogate_alpha
from ..storage.records import SearchResult, candidates_table
from .runs import Run, searched_images
from .search_result import SELECTED, search_content_hash

CANDIDATES = "search/candidates.parquet"
SPARE = 0.003  # share of images kept beyond beta, rounded, because the evaluation is stronger than a round


class Choosing:
    """Searches the configured grid, widens it, and chooses a candidate for every beta, as often as it is called."""

    _selection: Selection  # set by each call

    def __init__(self, opened: Run, executor: Executor) -> None:
        self.opened, self.executor, self._search = opened, executor, opened.config.search
        sample, names = searched_images(opened), ("label", "std_clean", "rob_clean", "rob_attacked")
        stored = opened.columns("attack", opened.attack_content_hash, names, sample)
        labels_N, std_NK, rob_NK, attacked_NK = stored.values()
        # the attack stage's rows, to which refinement rounds add points
        self.rows = CachedLogits(rob_NK, attacked_NK, labels_N, std_NK.argmax(dim=1))
        self._grid = Grid.configured(self._search, self._search.clamp, self._search.ln_k)
        self._criterion(self.rows)  # raises before Ray starts
        self._task = SearchTask(
            opened.store.uri, search_content_hash(opened), self._search.criterion,
            load_extensions(opened.config.extensions), str(Path.cwd()),
        )  # fmt: skip

    def _criterion(self, rows: CachedLogits) -> Criterion:
        kind, grid = CRITERIA.get(self._search.criterion), self._grid
        criterion: Criterion = kind.from_rows(rows, clamp=grid.clamp, ln_k=grid.ln_k)
        return criterion

    def __call__(self, rows: CachedLogits) -> SearchResult:
        """Search `self.rows` or, in refinement rounds, the same rows with `points`.

        Raises:
            InvalidInputError: if no candidate can be used at the deployed beta.
        """
        search, n_more = self._search, len(rows.points or ())
        criterion = self._criterion(rows)
        self.executor.report(
            f"searching {math.prod(self._grid.shape[1:]):,} candidates (s, p, c) on the stored logits of "
            f"{len(rows.labels_B):,} images" + (f", {n_more:,} more points of rounds" if n_more else "")
        )
        score = self._scoring(criterion, by_rounds=n_more > 0)
        found = self._selection = search_grid(criterion, self._grid, n_widen=search.widen or 0, score=score)
        deployed = found.for_beta(search.beta)
        survived = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
        alpha_d = surrogate_alpha(rows.rob_attacked_BK[survived], search.surrogate_beta)
        chosen = (replace(choice, surrogate_alpha=alpha_d) for choice in found.chosen if choice is not None)
        return SearchResult(
            criterion=search.criterion,
            clamp=deployed.clamp,
            ln_k=deployed.ln_k,
            deployed_beta=search.beta,
            surrogate_alpha=alpha_d,
            entries=tuple(with_predictions(choice, rows) for choice in chosen),
            n_candidates=found.objectives[0].numel(),
            n_undeployable=found.n_undeployable,
            notes=(
                *found.notes(search.beta),
                *self._sample_notes(),
                *self._comparison_notes(deployed),
                *(_limit_notes(search, criterion) if rows.points is not None else ()),
                *_widening_notes(found.grid),
                *_beta_notes(search),
            ),
        )

    def _scoring(self, criterion: Criterion, *, by_rounds: bool) -> Scoring:
        """Return how a grid is scored: by the executor (a Tune job on Ray) or, after rounds, in this process.

        After rounds, each beta keeps a few more images than required, if `rob` itself is right on that many.
        """
        here = partial(score_candidates, criterion)
        if by_rounds:
            n, most = criterion.n_attacked, criterion.attacked.n_right()
            return partial(here, kept=[max(1, min(most, wanted_images(beta, n))) for beta in self._grid.betas])
        on_tune = None
        if self._search.tune:
            on_tune = self.executor.scoring(self.rows, self._task, self.opened.config.compute)
        # a wider grid is scored here, because a second Tune job takes longer to start
        return lambda grid: here(grid) if on_tune is None or grid.widenings else on_tune(grid)

    def _sample_notes(self) -> tuple[str, ...]:
        """Return a note if the search does not read all images."""
        n_searched, n_images, first = len(self.rows.labels_B), self.opened.inputs.n_images, self._search.first or 0
        if searched_images(self.opened) is None:
            return ()
        how = f"the first {first:,} (search.first)" if first else ""
        if n_searched != first:
            drawn = "drawn at random with the run's seed (search.sample)"
            how = f"{drawn} from {how}" if how else drawn
        return (f"The search read {n_searched:,} of the {n_images:,} images, {how}; its predictions count those.",)

    def _comparison_notes(self, chosen: Choice) -> tuple[str, ...]:
        """Return a note if the criterion that this one is compared with would choose a less accurate classifier."""
        other, grid = CRITERIA.get(self._search.criterion).compared_with, replace(self._grid, betas=(chosen.beta,))
        if other is None:
            return ()
        criterion = CRITERIA.get(other).from_rows(self.rows, clamp=grid.clamp, ln_k=grid.ln_k)
        try:
            found = search_grid(criterion, grid)
        except InvalidInputError as error:
            return (f"beta {chosen.beta}: the {other} criterion finds nothing: {error}",)
        note = compare_candidates(found.for_beta(chosen.beta), chosen, self.rows)
        return (note,) if note else ()

    def store(self, result: SearchResult, write: Callable[[str, bytes], object]) -> None:
        """Write `search/candidates.parquet`, then `search/selected.json`."""
        content_hash = self._task.content_hash
        self.opened.store.write_all("search", {"candidates.parquet": candidates_table(self._selection, content_hash)})
        content = {"run_id": self.opened.config.run_id(), "content_hash": content_hash, "result": result.to_json()}
        content["digest"] = digest(content)
        write(SELECTED, json.dumps(content, indent=1, allow_nan=False).encode())


def attacks_its_choice(search: SearchConfig) -> bool:
    """Return whether the search has refinement rounds; criteria that fix the threshold by beta have none."""
    inequality: bool = CRITERIA.get(search.criterion).inequality
    return bool(search.rounds) and inequality


def wanted_images(beta: float, n_robust: int) -> int:
    """Return how many robust images of the robust classifier the rounds keep: a few more than beta requires.

    >>> wanted_images(0.95, 609), wanted_images(0.95, 38)
    (581, 37)
    """
    return min(n_robust, kept_images(beta, n_robust) + round(SPARE * n_robust))


def _widening_notes(grid: Grid) -> tuple[str, ...]:
    """Return a note if the grid was widened because its best candidate lay on its edge."""
    if not grid.widenings:
        return ()
    scales, powers, biases = (
        f"{min(values):.3g} to {max(values):.3g}" for values in (grid.scales, grid.powers, grid.biases)
    )
    return (
        f"The default grid was widened {grid.widenings} time{'s' * (grid.widenings > 1)} because its optimum lay on "
        f"the edge: search.scales reach from {scales}, search.powers from {powers}, search.biases from {biases}. "
        "search.widen: 0 leaves it as it is.",
    )


def _limit_notes(search: SearchConfig, criterion: Criterion) -> tuple[str, ...]:
    """Return a note if rounds have shown that `rob` itself is robust on fewer images than beta requires."""
    n_right, n_robust = criterion.attacked.n_right(), criterion.n_attacked
    if n_right >= kept_images(search.beta, n_robust):
        return ()
    return (
        f"beta {search.beta}: the attack on the mixture found images that fool rob alone; it is right at all points of "
        f"{n_right} of {n_robust} images, and no mixture keeps more.",
    )


def _beta_notes(search: SearchConfig) -> tuple[str, ...]:
    """Return a note on the meaning of beta if the criterion rules refinement rounds out."""
    if not search.rounds or attacks_its_choice(search):
        return ()
    return (
        f"criterion {search.criterion!r} fixes the margin threshold by beta, so the choice was not attacked and made "
        "again (search.rounds): beta holds under the stored perturbations only.",
    )

"""The search over all known adversarial examples: grid, the choice of every beta, and predictions."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config.register import CRITERIA, load_extensions
from ..config.run_config import digest
from ..config.search_config import SearchConfig
from ..distributed.executor import Executor, Scoring
from ..distributed.tasks import SearchTask
from ..errors import InvalidInputError
from ..selection.choice import Choice
from ..selection.criteria import Criterion, Scores
from ..selection.exploration import Selection, best_choice, notes, wider_grid
from ..selection.grid import Grid, Pair, kept_images
from ..selection.inputs import CachedLogits
from ..selection.prediction import compare_candidates, with_predictions
from ..selection.selection import score_candidates, search_grid, surrogate_alpha
from ..storage.records import SearchResult, candidates_table
from .runs import Run, searched_images
from .search_result import SELECTED, search_content_hash

CANDIDATES = "search/candidates.parquet"
SPARE = 0.003  # share of images kept beyond beta, rounded, because the evaluation is stronger than a round


class Choosing:
    """Searches the configured grids, widens them, and chooses a candidate for every beta, as often as it is called."""

    def __init__(self, opened: Run, executor: Executor) -> None:
        self.opened, self.executor, self._search = opened, executor, opened.config.search
        sample, names = searched_images(opened), ("label", "std_clean", "rob_clean", "rob_attacked")
        stored = opened.columns("attack", opened.attack_content_hash, names, sample)
        labels_N, std_NK, rob_NK, attacked_NK = stored.values()
        # the attack stage's rows, to which refinement rounds add points
        self.rows = CachedLogits(rob_NK, attacked_NK, labels_N, std_NK.argmax(dim=1))
        first = self._search.pairs()[0]
        self._grid = Grid.configured(self._search, *first)
        self._criterion(self.rows, first)  # raises before Ray starts
        self._task = SearchTask(
            opened.store.uri, search_content_hash(opened), self._search.criterion,
            load_extensions(opened.config.extensions), str(Path.cwd()),
        )  # fmt: skip
        self._parts: tuple[Selection, ...] = ()  # set by each call

    def _criterion(self, rows: CachedLogits, pair: Pair) -> Criterion:
        clamp, ln_k = pair
        criterion: Criterion = CRITERIA.get(self._search.criterion).from_rows(rows, clamp=clamp, ln_k=ln_k)
        return criterion

    def __call__(self, rows: CachedLogits) -> SearchResult:
        """Search `self.rows` or, in refinement rounds, the same rows with `points`.

        Raises:
            InvalidInputError: if no candidate can be used at the deployed beta.
        """
        search, n_more = self._search, len(rows.points or ())
        criteria = {pair: self._criterion(rows, pair) for pair in search.pairs()}
        n_candidates = len(criteria) * math.prod(self._grid.shape[1:])
        self.executor.report(
            f"searching {n_candidates:,} candidates (s, p, c) on the stored logits of {len(rows.labels_B):,} images"
            + (f", {n_more:,} more points of rounds" if n_more else "")
        )
        self._parts = explored(search, criteria, self._scoring(criteria, by_rounds=n_more > 0))
        choices = {beta: best_choice(self._parts, beta) for beta in search.all_betas()}
        deployed = choices[search.beta] or self._parts[0].for_beta(search.beta)  # which raises with the reason
        survived = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
        alpha_d = surrogate_alpha(rows.rob_attacked_BK[survived], search.surrogate_beta)
        found = (replace(choice, surrogate_alpha=alpha_d) for choice in choices.values() if choice is not None)
        return SearchResult(
            criterion=search.criterion,
            clamp=deployed.clamp,
            ln_k=deployed.ln_k,
            deployed_beta=search.beta,
            surrogate_alpha=alpha_d,
            entries=tuple(with_predictions(choice, rows) for choice in found),
            n_candidates=sum(part.objectives[0].numel() for part in self._parts),
            n_undeployable=sum(part.n_undeployable for part in self._parts),
            notes=(
                *notes(self._parts, {search.beta: deployed}),
                *self._sample_notes(),
                *self._comparison_notes(deployed),
                *(_limit_notes(search, criteria) if rows.points is not None else ()),
                *_widening_notes(self._parts),
                *_beta_notes(search),
            ),
        )

    def _scoring(self, criteria: Mapping[Pair, Criterion], *, by_rounds: bool) -> Scoring:
        """Return how grids are scored: by the executor (a Tune job on Ray) or, after rounds, in this process.

        After rounds, each beta keeps a few more images than required, if `rob` itself is right on that many.
        """

        def here(grids: Sequence[Grid]) -> list[Scores]:
            return [score_candidates(criteria[grid.pair], grid, kept(criteria[grid.pair], grid)) for grid in grids]

        def kept(criterion: Criterion, grid: Grid) -> list[float] | None:
            n, most = criterion.n_attacked, criterion.attacked.n_right()
            return [max(1, min(most, wanted_images(beta, n))) for beta in grid.betas] if by_rounds else None

        on_tune = None
        if self._search.tune and not by_rounds:
            on_tune = self.executor.scoring(self.rows, self._task, self.opened.config.compute)
        if on_tune is None:
            return here
        # a wider grid is scored here, because a second Tune job takes longer to start
        return lambda grids: here(grids) if any(grid.widenings for grid in grids) else on_tune(grids)

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
        search, other = self._search, CRITERIA.get(self._search.criterion).compared_with
        if other is None:
            return ()
        criterion = CRITERIA.get(other).from_rows(self.rows, clamp=search.clamp, ln_k=search.ln_k)
        try:
            found = search_grid(criterion, replace(self._grid, betas=(search.beta,)))
        except InvalidInputError as error:
            return (f"beta {search.beta}: the {other} criterion finds nothing: {error}",)
        note = compare_candidates(found.for_beta(search.beta), chosen, self.rows)
        return (note,) if note else ()

    def store(self, result: SearchResult, write: Callable[[str, bytes], object]) -> None:
        """Write `search/candidates.parquet`, then `search/selected.json`."""
        content_hash = self._task.content_hash
        self.opened.store.write_all("search", {"candidates.parquet": candidates_table(self._parts, content_hash)})
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


def explored(search: SearchConfig, criteria: Mapping[Pair, Criterion], scoring: Scoring) -> tuple[Selection, ...]:
    """Search one grid per clamp and width, and widen that of the best one while an optimum lies on its edge."""
    grids = [Grid.configured(search, *pair) for pair in search.pairs()]
    known = {grid.pair: (grid, scores) for grid, scores in zip(grids, scoring(grids), strict=True)}
    parts = {pair: Selection.of(criteria[pair], *found) for pair, found in known.items()}
    while grid := wider_grid([*parts.values()], search.beta, search.widen or 0):
        known[grid.pair] = grid, _widened(grid, *known[grid.pair], scoring)
        parts[grid.pair] = Selection.of(criteria[grid.pair], *known[grid.pair])
    return tuple(parts.values())


def _widened(grid: Grid, tried: Grid, known: Scores, scoring: Scoring) -> Scores:
    """Return the scores of a grid that has grown: only its new candidates are scored."""
    boxes = grid.beside(tried)
    whole = Scores(*(part.new_empty(len(part), *grid.shape[1:]) for part in known))
    for box, scores in zip([tried, *boxes], [known, *scoring(boxes)], strict=True):
        s_SPB, p_SPB, b_SPB = torch.meshgrid(*map(torch.tensor, grid.places(box)), indexing="ij")
        for into, part in zip(whole, scores, strict=True):
            into[:, s_SPB, p_SPB, b_SPB] = part
    return whole


def _widening_notes(parts: Sequence[Selection]) -> tuple[str, ...]:
    """Return a note on each grid that was widened because its best candidate lay on its edge."""
    found = []
    for grid in (part.grid for part in parts if part.grid.widenings):
        scales, powers, biases = (
            f"{min(values):.3g} to {max(values):.3g}" for values in (grid.scales, grid.powers, grid.biases)
        )
        found.append(
            f"The default grid ({grid.clamp}, LayerNorm over {grid.ln_k or 'all logits'}) was widened {grid.widenings} "
            f"time{'s' * (grid.widenings > 1)} because its optimum lay on the edge: search.scales reach from {scales}, "
            f"search.powers from {powers}, search.biases from {biases}. search.widen: 0 leaves it as it is."
        )
    return tuple(found)


def _limit_notes(search: SearchConfig, criteria: Mapping[Pair, Criterion]) -> tuple[str, ...]:
    """Return a note if rounds have shown that `rob` itself is robust on fewer images than beta requires."""
    first = next(iter(criteria.values()))
    n_right, n_robust = first.attacked.n_right(), first.n_attacked
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

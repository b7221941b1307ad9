"""The search over all known adversarial examples: grid, the choice of every beta, and predictions."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config.register import CRITERIA, load_extensions
from ..config.run_config import digest
from ..config.search_config import SearchConfig, criterion_stage, grid_values
from ..distributed.executor import Executor
from ..distributed.search_inputs import SearchInputs, SearchTask
from ..errors import InvalidInputError
from ..mixing.clamps import Clamp
from ..selection.choice import Choice
from ..selection.criteria import Criterion, Scores
from ..selection.exploration import Exploration, Selection
from ..selection.grid import Grid, Pair, kept_images
from ..selection.inputs import CachedLogits
from ..selection.prediction import compare_candidates, with_predictions
from ..selection.selection import score_candidates, search_grid, surrogate_alpha
from ..storage.records import SearchResult, candidates_table
from ..storage.tables import read_attack_records
from .rounds import Points, centered_threshold, wanted_images
from .runs import Run, searched_images
from .search_result import SELECTED, search_content_hash
from .stage import stage_of

CANDIDATES = "search/candidates.parquet"
WITHOUT_ROUNDS = (
    "criterion {!r} fixes the margin threshold by beta, so the choice was not attacked and made again (search.rounds): "
    "beta holds under the stored perturbations only."
)
CERTIFIED = (
    "The search counted certificates: beta is the share of the {:,} images certified for rob alone that the mixture "
    "stays certified on, and no attack is asked for that."
)

Scoring = Callable[[Sequence[Grid]], list[Scores]]


class Choosing:
    """Searches the configured grids, widens them, and chooses a candidate for every beta, as often as it is called."""

    def __init__(self, opened: Run, executor: Executor) -> None:
        self.opened, self._executor, self._search = opened, executor, opened.config.search
        self._sample = searched_images(opened)
        given = opened.rows, opened.partitions, opened.attack_content_hash
        self.records = read_attack_records(*given, sample_ids=self._sample)
        stored = (
            self.records.labels_N,
            self.records.std_clean_NK,
            self.records.rob_clean_NK,
            self.records.rob_attacked_NK,
        )
        self._inputs = SearchInputs(*(values.numpy() for values in stored))
        self._rows = self._inputs.rows()
        if (needed := needed_stage(self._search)) is not None:
            ids = None if self._sample is None else self._sample.tolist()
            certificates = stage_of(opened.config, needed).certificates(opened, ids)
            self._rows = replace(self._rows, certificates=certificates)
        self._criterion(self._rows, self._search.clamp, self._search.ln_k)  # raises before Ray starts
        extensions = load_extensions(opened.config.extensions)
        self._task = SearchTask(
            opened.store.uri, search_content_hash(opened), self._search.criterion, extensions, str(Path.cwd())
        )
        self.explored: Exploration | None = None  # by the last call

    def _criterion(self, rows: CachedLogits, clamp: Clamp, ln_k: int | None) -> Criterion:
        criterion: Criterion = CRITERIA.get(self._search.criterion).from_rows(rows, clamp=clamp, ln_k=ln_k)
        return criterion

    def __call__(self, points: Points | None) -> SearchResult:
        """Search over the adversarial examples of rounds or, for None, over those of the attack stage alone."""
        search, rows = self._search, self._rows
        n_images = len(rows.labels_B)
        n_more = 0 if points is None else len(points.image_P) - n_images
        if points is not None and n_more:
            rows = replace(rows, points=points.beyond(n_images))
        criteria: dict[Pair, Criterion] = {pair: self._criterion(rows, *pair) for pair in search.pairs()}
        n_candidates = len(criteria) * math.prod(grid_of(search).shape[1:])
        found = f", {n_more:,} more points of rounds" if n_more else ""
        self._executor.report(
            f"searching {n_candidates:,} candidates (s, p, c) on the stored logits of {n_images:,} images{found}"
        )
        exploration = explored(search, criteria, self._scoring(search, criteria, by_rounds=rows.points is not None))
        self.explored = exploration
        notes = (
            *self._sample_notes(),
            *_comparison_notes(search, self._inputs, exploration),
            *(_limit_notes(search, criteria) if points is not None else ()),
            *_widening_notes(exploration),
        )
        return self._result(points, exploration, notes)

    def _result(self, points: Points | None, exploration: Exploration, notes: Sequence[str]) -> SearchResult:
        search, records = self._search, self.records
        choices = {beta: exploration.choice(beta) for beta in search.all_betas()}
        deployed, first = choices[search.beta], exploration.parts[0]
        if deployed is None:
            first.for_beta(search.beta)  # raises with the reason
        assert deployed is not None
        survived = records.rob_attacked_NK.argmax(dim=1) == records.labels_N
        alpha_d = surrogate_alpha(records.rob_attacked_NK[survived], search.surrogate_beta)
        found = (replace(choice, surrogate_alpha=alpha_d) for choice in choices.values() if choice is not None)
        remarks = (remark for remark in exploration.remarks(choices) if remark.beta in (None, search.beta))
        return SearchResult(
            criterion=search.criterion,
            clamp=deployed.clamp,
            ln_k=deployed.ln_k,
            deployed_beta=search.beta,
            surrogate_alpha=alpha_d,
            entries=tuple(_predicted(choice, self._rows, points) for choice in found),
            n_candidates=sum(part.objectives[0].numel() for part in exploration.parts),
            n_undeployable=sum(part.n_undeployable for part in exploration.parts),
            notes=(*map(str, remarks), *notes, *_certified_notes(search, first)),
        )

    def _sample_notes(self) -> tuple[str, ...]:
        if self._sample is None:
            return ()
        n_searched, n_images, first = len(self._sample), self.opened.inputs.n_images, self._search.first or 0
        how = f"the first {first:,} (search.first)" if first else ""
        if n_searched != first:
            drawn = "drawn at random with the run's seed (search.sample)"
            how = f"{drawn} from {how}" if how else drawn
        return (f"The search read {n_searched:,} of the {n_images:,} images, {how}; its predictions count those.",)

    def _scoring(self, search: SearchConfig, criteria: dict[Pair, Criterion], *, by_rounds: bool) -> Scoring:
        """Return how grids are scored: by the executor (a Tune job on Ray) or, after rounds, in this process.

        After rounds, each beta keeps a few more images than required, if `rob` itself is right on that many.
        """

        def here(grids: Sequence[Grid]) -> list[Scores]:
            return [score_candidates(criteria[grid.pair], grid, kept(criteria[grid.pair], grid)) for grid in grids]

        def kept(criterion: Criterion, grid: Grid) -> list[float]:
            n = criterion.n_attacked
            if not by_rounds:
                return [max(1, min(n, criterion.required(beta))) for beta in grid.betas]
            return [max(1, min(criterion.attacked.n_right(), wanted_images(beta, n))) for beta in grid.betas]

        trials = None
        if search.tune and not by_rounds and not needed_stage(search):
            trials = self._executor.scoring(self._inputs, self._task, self.opened.config.compute)
        if trials is None:
            return here
        on_tune = trials
        # a wider grid is scored here, because a second Tune job takes longer to start
        return lambda grids: here(grids) if any(grid.widenings for grid in grids) else on_tune(grids)

    def store(self, result: SearchResult, write: Callable[[str, bytes], object]) -> None:
        """Write `search/candidates.parquet`, then `search/selected.json`."""
        assert self.explored is not None
        content_hash = self._task.content_hash
        self.opened.store.write_all("search", {"candidates.parquet": candidates_table(self.explored, content_hash)})
        content = {"run_id": self.opened.config.run_id(), "content_hash": content_hash, "result": result.to_json()}
        content["digest"] = digest(content)
        write(SELECTED, json.dumps(content, indent=1, allow_nan=False).encode())


def attacks_its_choice(search: SearchConfig) -> bool:
    """Return whether the search has rounds; criteria that fix the threshold by beta or count certificates have none."""
    return bool(search.rounds) and CRITERIA.get(search.criterion).inequality and needed_stage(search) is None


def needed_stage(search: SearchConfig) -> str | None:
    """Return the stage whose certificates the criterion reads, if any."""
    return criterion_stage(search.criterion)


def explored(search: SearchConfig, criteria: dict[Pair, Criterion], scoring: Scoring) -> Exploration:
    """Search one grid per clamp and width, and widen that of the best one while an optimum lies on its edge."""
    grids = [grid_of(search, pair) for pair in search.pairs()]
    known = {grid.pair: (grid, scores) for grid, scores in zip(grids, scoring(grids), strict=True)}
    exploration = Exploration(tuple(Selection.of(criteria[pair], *found) for pair, found in known.items()))
    while grid := exploration.wider(search.beta, search.widen or 0):
        known[grid.pair] = grid, _widened(grid, *known[grid.pair], scoring)
        exploration = exploration.with_part(Selection.of(criteria[grid.pair], *known[grid.pair]))
    return exploration


def _widened(grid: Grid, tried: Grid, known: Scores, scoring: Scoring) -> Scores:
    """Return the scores of a grid that has grown: only its new candidates are scored."""
    boxes = grid.beside(tried)
    whole = Scores(*(part.new_empty(len(part), *grid.shape[1:]) for part in known))
    for box, scores in zip([tried, *boxes], [known, *scoring(boxes)], strict=True):
        s_SPB, p_SPB, b_SPB = torch.meshgrid(*map(torch.tensor, grid.places(box)), indexing="ij")
        for into, part in zip(whole, scores, strict=True):
            into[:, s_SPB, p_SPB, b_SPB] = part
    return whole


def grid_of(search: SearchConfig, pair: Pair | None = None) -> Grid:
    clamp, ln_k = pair or (search.clamp, search.ln_k)
    return Grid.checked(
        scales=grid_values(search.scales),
        powers=grid_values(search.powers),
        biases=grid_values(search.biases),
        betas=search.all_betas(),
        clamp=clamp,
        ln_k=ln_k,
    )


def _comparison_notes(search: SearchConfig, inputs: SearchInputs, exploration: Exploration) -> tuple[str, ...]:
    """Return a note if the criterion that this one is compared with would choose a less accurate mixed classifier."""
    other, chosen = CRITERIA.get(search.criterion).compared_with, exploration.choice(search.beta)
    if other is None or chosen is None:
        return ()
    deployed = replace(grid_of(search), betas=(search.beta,))
    try:
        found = search_grid(inputs.criterion(other, search.clamp, search.ln_k), deployed)
    except InvalidInputError as error:
        return (f"beta {search.beta}: the {other} criterion finds nothing: {error}",)
    note = compare_candidates(found.for_beta(search.beta), chosen, inputs.rows())
    return (note,) if note else ()


def _widening_notes(exploration: Exploration) -> tuple[str, ...]:
    """Return a note on each grid that was widened because its best candidate lay on its edge."""
    grown = [part.grid for part in exploration.parts if part.grid.widenings]
    return tuple(
        f"The default grid ({grid.clamp}, {layer_norm}) was widened {grid.widenings} time{'s' * (grid.widenings > 1)} "
        f"because its optimum lay on the edge: search.scales reach from {min(grid.scales):.3g} to "
        f"{max(grid.scales):.3g}, search.powers from {min(grid.powers):.3g} to {max(grid.powers):.3g}, search.biases "
        f"from {min(grid.biases):.3g} to {max(grid.biases):.3g}. search.widen: 0 leaves it as it is."
        for grid in grown
        for layer_norm in [f"LayerNorm over {grid.ln_k}" if grid.ln_k else "LayerNorm over all logits"]
    )


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


def _certified_notes(search: SearchConfig, first: Selection) -> tuple[str, ...]:
    """Return a note on the meaning of beta if the choice is not attacked."""
    if needed_stage(search) is not None:
        return (CERTIFIED.format(first.n_attacked),)
    return (WITHOUT_ROUNDS.format(search.criterion),) if search.rounds and not attacks_its_choice(search) else ()


def _predicted(choice: Choice, cached: CachedLogits, points: Points | None) -> Choice:
    """Return the choice with its predictions; with examples of rounds, each image counts by its hardest one."""
    if points is None:
        return with_predictions(choice, cached)
    choice = centered_threshold(choice, cached)
    gaps_B = points.largest_log_gaps(cached.labels_B, choice.transform(), any_std=False)
    return with_predictions(choice, cached, kept_B=gaps_B <= choice.log_one_minus_cutoff)

"""The widening of a grid, and what is chosen among clamps and LayerNorm widths."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mixednuts_dist.config.search_config import SearchConfig
from mixednuts_dist.selection.choice import Choice
from mixednuts_dist.selection.criteria import Criterion, ExactCriterion, Scores
from mixednuts_dist.selection.exploration import Selection, best_choice, notes, wider_grid
from mixednuts_dist.selection.grid import WIDEST, Grid, Pair
from mixednuts_dist.selection.selection import score_candidates, search_grid
from mixednuts_dist.stages import choosing

BETA = 0.9
GRID = Grid((0.1, 1.0, 10.0), (1.0, 2.0, 4.0), (-2.0, -1.0, 0.0), (1.0, BETA))
GELU: tuple[Pair, ...] = (("gelu", None),)


def criterion(pair: Pair, n_images: int = 300) -> Criterion:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(10, (n_images,), generator=generator)
    clean = torch.randn(n_images, 10, generator=generator)
    clean[torch.arange(n_images), labels] += 4 * torch.rand(n_images, generator=generator)
    attacked = clean.clone()
    attacked[torch.arange(n_images), labels] -= 0.3
    std_pred = torch.where(torch.rand(n_images, generator=generator) < 0.9, labels, clean.argmin(1))
    clamp, ln_k = pair
    return ExactCriterion.of(attacked, labels, clean, labels, std_pred, clamp=clamp, ln_k=ln_k)


def explored(grid: Grid, pairs: tuple[Pair, ...], n_widen: int = 0) -> list[Selection]:
    def scored(grid: Grid) -> Selection:
        return Selection.of(criterion(grid.pair), grid, score_candidates(criterion(grid.pair), grid))

    parts = {pair: scored(replace(grid, clamp=pair[0], ln_k=pair[1])) for pair in pairs}
    while wider := wider_grid([*parts.values()], BETA, n_widen):
        parts[wider.pair] = scored(wider)
    return [*parts.values()]


def chosen(parts: list[Selection], beta: float = BETA) -> Choice:
    choice = best_choice(parts, beta)
    assert choice is not None
    return choice


def test_the_choice_is_the_best_over_all_clamps_and_widths() -> None:
    pairs: tuple[Pair, ...] = (("gelu", None), ("linear", None), ("gelu", 4))
    parts = explored(GRID, pairs)
    counts = [part.for_beta(BETA).objective_count for part in parts]
    assert len(set(counts)) > 1
    assert chosen(parts).objective_count == max(counts)
    assert chosen(parts).pair == pairs[counts.index(max(counts))]


def test_ties_prefer_the_pair_that_comes_first() -> None:
    """A width of all 10 classes is the default one under another name: every score is the same."""
    for pairs in ((("gelu", None), ("gelu", 10)), (("gelu", 10), ("gelu", None))):
        assert chosen(explored(GRID, pairs)).ln_k == pairs[0][1]


def test_grid_widens_until_the_optimum_is_inside_or_at_a_limit() -> None:
    narrow = Grid((0.1, 0.2), (1.0, 1.5), (-0.1, 0.0), (1.0, BETA))
    plain, widened = (explored(narrow, GELU, n) for n in (0, 16))
    assert chosen(plain).on_grid_edge
    (part,) = widened  # the wide grid holds the narrow one, and replaces it
    assert 1 <= part.grid.widenings < 16
    assert set(narrow) < set(part.grid)
    assert chosen(widened).objective_count >= chosen(plain).objective_count
    axes = {"scale": "scales", "power": "powers", "bias": "biases"}
    for beta in narrow.betas:
        choice = chosen(widened, beta)
        for name in choice.on_grid_edge:
            assert part.grid.beyond(axes[name], getattr(choice, name)) == (), "only a limit stops it"
            limit = "{} {:g} to {:g}".format(axes[name], *WIDEST[axes[name]])
            assert any(limit in note for note in notes(widened, {beta: choice}))


def test_grid_wider_grows_at_edges_within_the_limits() -> None:
    wider = GRID.wider((10.0, 2.0, -2.0))
    assert wider is not None and wider.widenings == 1
    assert wider.scales == (0.1, 1.0, 10.0, pytest.approx(100.0))
    assert (wider.powers, wider.biases) == (GRID.powers, (-3.0, -2.0, -1.0, 0.0))
    assert GRID.wider((1.0, 2.0, -1.0)) is None
    assert replace(GRID, powers=(1.0, 16.0)).wider((1.0, 16.0, -1.0)) is None


def test_growing_grid_scores_each_candidate_once() -> None:
    criteria, scored = {GELU[0]: criterion(GELU[0], 200)}, list[tuple[float, float, float]]()

    def scoring(grids: Sequence[Grid]) -> list[Scores]:
        scored.extend(at for grid in grids for at in grid)
        return [score_candidates(criteria[grid.pair], grid) for grid in grids]

    (part,) = choosing.explored(SearchConfig(), criteria, scoring)
    assert part.grid.widenings > 1
    assert sorted(scored) == sorted(part.grid)
    whole = search_grid(criteria[GELU[0]], part.grid)
    assert torch.equal(part.kept, whole.kept)
    assert torch.equal(part.objectives.nan_to_num(-1), whole.objectives.nan_to_num(-1))
    torch.testing.assert_close(part.log_one_minus_cutoffs, whole.log_one_minus_cutoffs, equal_nan=True)

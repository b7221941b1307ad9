"""The rounds of a search: where they zoom, when they stop, and what is chosen among clamps, widths and rounds."""

import itertools
from dataclasses import replace

import pytest
import torch

from mixednuts_dist.selection.choice import Choice
from mixednuts_dist.selection.criteria import Criterion, ExactCriterion
from mixednuts_dist.selection.exploration import Exploration, GridRefinements, Selection
from mixednuts_dist.selection.grid import WIDEST, Grid, Pair
from mixednuts_dist.selection.selection import score_candidates

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


def explored(rounds: GridRefinements, pairs: tuple[Pair, ...]) -> Exploration:
    exploration = Exploration(pairs)
    while proposed := rounds.propose(exploration):
        exploration = exploration.with_parts(
            Selection.of(criterion(grid.pair), grid, score_candidates(criterion(grid.pair), grid)) for grid in proposed
        )
    return exploration


def chosen(exploration: Exploration) -> Choice:
    choice = exploration.choice(BETA)
    assert choice is not None
    return choice


def test_inside_the_grid_it_zooms_between_the_neighbours() -> None:
    zoomed = GRID.zoomed(GRID, (1.0, 2.0, -1.0))
    assert zoomed.scales == pytest.approx((10**-0.5, 1.0, 10**0.5))
    assert zoomed.powers == pytest.approx((1.75, 2.5, 3.25))
    assert zoomed.biases == pytest.approx((-1.5, -1.0, -0.5))
    assert zoomed.betas == GRID.betas


def test_on_the_edge_it_goes_beyond() -> None:
    high, low = (GRID.zoomed(GRID, best) for best in ((10.0, 4.0, 0.0), (0.1, 1.0, -2.0)))
    assert max(high.scales) == pytest.approx(10**1.5)
    assert max(high.powers) == pytest.approx(5.0)
    assert max(high.biases) == pytest.approx(0.5)
    assert min(low.scales) == pytest.approx(0.1 * 10**-0.5)
    assert 0.5 < min(low.powers) < 1.0
    assert min(low.biases) == pytest.approx(-2.5)


def test_an_axis_of_one_value_stays() -> None:
    grid = replace(GRID, powers=(3.0,))
    assert grid.zoomed(grid, (1.0, 3.0, -1.0)).powers == (3.0,)


@pytest.mark.parametrize("n_refine", [0, 1, 6])
def test_rounds_go_on_while_the_objective_improves(n_refine: int) -> None:
    exploration = explored(GridRefinements(GRID, BETA, n_refine), GELU)
    rounds = [part.grid.refinement for part in exploration.parts]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) <= n_refine + 1
    counts = [chosen(exploration.before(i + 1)).objective_count for i in rounds]
    assert counts == sorted(counts)
    assert all(a < b for a, b in itertools.pairwise(counts[:-1]))
    if 0 < len(rounds) - 1 < n_refine:
        assert counts[-1] == counts[-2]
    if n_refine == 6:
        assert len(rounds) < 7
        assert counts[-1] > counts[0]


def test_every_round_has_every_beta_and_the_size_of_the_grid() -> None:
    for part in explored(GridRefinements(GRID, BETA, 2), GELU).parts:
        assert part.objectives.shape == GRID.shape
        assert part.betas == GRID.betas


def test_the_choice_is_the_best_over_all_clamps_and_widths() -> None:
    pairs: tuple[Pair, ...] = (("gelu", None), ("linear", None), ("gelu", 4))
    exploration = explored(GridRefinements(GRID, BETA, 0), pairs)
    counts = [part.for_beta(BETA).objective_count for part in exploration.parts]
    assert len(set(counts)) > 1
    assert chosen(exploration).objective_count == max(counts)
    assert (chosen(exploration).clamp, chosen(exploration).ln_k) == pairs[counts.index(max(counts))]


def test_ties_prefer_the_pair_that_comes_first() -> None:
    """A width of all 10 classes is the default one under another name: every score is the same."""
    for pairs in ((("gelu", None), ("gelu", 10)), (("gelu", 10), ("gelu", None))):
        assert chosen(explored(GridRefinements(GRID, BETA, 0), pairs)).ln_k == pairs[0][1]


def test_the_edge_is_that_of_all_rounds() -> None:
    exploration = explored(GridRefinements(GRID, BETA, 3), GELU)
    tried = exploration.tried(GELU[0])
    for beta in GRID.betas:
        found = exploration.choice(beta)
        assert found is not None
        assert found.on_grid_edge == tried.on_edge(found.at)
    assert tried.scales[0] <= 0.1
    assert len(tried.scales) > 3


def test_remarks_name_the_whole_search() -> None:
    saturated = replace(GRID, scales=(1.0, 1e6))
    first, *others = explored(GridRefinements(saturated, BETA, 0), GELU).remarks([BETA])
    assert first.beta is None
    assert str(first).endswith("float32 could not carry their logits, cutoff or 1 - alpha.")
    assert all(remark.beta == BETA for remark in others)


def test_a_grid_widens_where_its_optimum_lies_on_an_edge_until_it_is_inside_or_the_limit_is_reached() -> None:
    narrow = Grid((0.1, 0.2), (1.0, 1.5), (-0.1, 0.0), (1.0, BETA))
    plain, widened = (explored(GridRefinements(narrow, BETA, 0, n_widen=n), GELU) for n in (0, 16))
    assert chosen(plain).on_grid_edge
    (part,) = widened.parts  # the wide grid holds the narrow one, and replaces it
    assert 1 <= part.grid.widenings < 16
    assert set(narrow) < set(part.grid)
    assert chosen(widened).objective_count >= chosen(plain).objective_count
    axes = {"scale": "scales", "power": "powers", "bias": "biases"}
    for beta in narrow.betas:
        choice = widened.choice(beta)
        assert choice is not None
        for name in choice.on_grid_edge:
            assert part.grid.beyond(axes[name], getattr(choice, name)) == (), "only a limit stops it"
            limit = "{} {:g} to {:g}".format(axes[name], *WIDEST[axes[name]])
            assert any(limit in str(remark) for remark in widened.remarks([beta]))


def test_a_grid_grows_at_the_edges_of_a_candidate_alone_and_not_beyond_the_limits() -> None:
    wider = GRID.wider((10.0, 2.0, -2.0))
    assert wider is not None and wider.widenings == 1
    assert wider.scales == (0.1, 1.0, 10.0, pytest.approx(100.0))
    assert (wider.powers, wider.biases) == (GRID.powers, (-3.0, -2.0, -1.0, 0.0))
    assert GRID.wider((1.0, 2.0, -1.0)) is None
    assert replace(GRID, powers=(1.0, 16.0)).wider((1.0, 16.0, -1.0)) is None


def test_refinements_begin_where_the_widened_grid_ends() -> None:
    narrow = Grid((0.1, 0.2), (1.0, 1.5), (-0.1, 0.0), (1.0, BETA))
    first, *finer = explored(GridRefinements(narrow, BETA, 1, n_widen=1), GELU).parts
    assert first.grid.widenings == 1
    assert [part.grid.refinement for part in finer] == [1]
    assert finer[0].grid.shape == narrow.shape

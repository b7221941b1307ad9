"""The widening of a grid."""

from dataclasses import replace

import pytest

from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.grid import AXES, Grid
from mixednuts_dist.selection.selection import search_grid
from tests.helpers.random_logits import random_rows

BETA = 0.9
GRID = Grid((0.1, 1.0, 10.0), (1.0, 2.0, 4.0), (-2.0, -1.0, 0.0), (1.0, BETA))


def test_grid_widens_until_the_optimum_is_inside_or_at_a_limit() -> None:
    criterion = ExactCriterion.from_rows(random_rows(), clamp="gelu", ln_k=None)
    narrow = Grid((0.1, 0.2), (1.0, 1.5), (-0.1, 0.0), (1.0, BETA))
    plain, widened = (search_grid(criterion, narrow, n_widen=n) for n in (0, 16))
    assert plain.grid == narrow
    assert plain.for_beta(BETA).on_grid_edge
    assert 1 <= widened.grid.widenings < 16
    assert set(narrow) < set(widened.grid)
    for beta in narrow.betas:
        choice = widened.for_beta(beta)
        assert choice.objective_count >= plain.for_beta(beta).objective_count
        for name in choice.on_grid_edge:
            assert widened.grid.beyond(AXES[name], getattr(choice, name)) == (), "only a limit stops it"


def test_grid_wider_grows_at_edges_within_the_limits() -> None:
    wider = GRID.wider((10.0, 2.0, -2.0))
    assert wider is not None and wider.widenings == 1
    assert wider.scales == (0.1, 1.0, 10.0, pytest.approx(100.0))
    assert (wider.powers, wider.biases) == (GRID.powers, (-3.0, -2.0, -1.0, 0.0))
    assert GRID.wider((1.0, 2.0, -1.0)) is None
    assert replace(GRID, powers=(1.0, 16.0)).wider((1.0, 16.0, -1.0)) is None

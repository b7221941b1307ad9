"""The criteria on random rows: examples of refinement rounds, the quantile of the reference code, wider grids."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mixednuts_dist.mixing.margins import top2_margin
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.criteria import ExactCriterion, InterpolatedPaperCriterion
from mixednuts_dist.selection.grid import AXES, Grid
from mixednuts_dist.selection.inputs import AttackedPoints
from mixednuts_dist.selection.kernel import Slab
from mixednuts_dist.selection.prediction import hardest_log1m_margins
from mixednuts_dist.selection.selection import score_candidates, search_grid
from tests.helpers.random_logits import GRID, exact, random_rows, with_points


def test_stds_own_class_at_a_point_asks_for_less_than_any_class() -> None:
    cached = random_rows()
    points = with_points(cached, 90)
    worst = exact(cached, points)
    std_pred = points.rob_logits_PK.argsort(dim=1)[:, 3]
    actual = exact(cached, AttackedPoints(points.rob_logits_PK, points.image_P, std_pred))
    runner_up = exact(
        cached, AttackedPoints(points.rob_logits_PK, points.image_P, points.rob_logits_PK.topk(2).indices[:, 1])
    )
    usable = ~(worst.infeasible | actual.infeasible)
    assert (actual.objectives[usable].nan_to_num() >= worst.objectives[usable].nan_to_num()).all()
    assert (actual.objectives[usable] > worst.objectives[usable]).any()
    assert worst.for_beta(0.9).objective == runner_up.for_beta(0.9).objective


@pytest.mark.parametrize("at", list(GRID)[::5])
def test_prediction_uses_the_rule_of_the_search(at: tuple[float, float, float]) -> None:
    cached = random_rows()
    points = with_points(cached, 90)
    std_pred = torch.randint(10, (90,), generator=torch.Generator().manual_seed(3))
    cached = replace(cached, points=AttackedPoints(points.rob_logits_PK, points.image_P, std_pred))
    scale, power, bias = at
    criterion, slab = ExactCriterion.from_rows(cached, clamp="gelu", ln_k=None), Slab(bias, "gelu", (power,), (scale,))
    attacked_n = criterion.log1m_leads(slab)[0][0, 0]
    counted_Ln = attacked_n <= attacked_n.sort().values.clamp(max=0)[:, None]
    robust_B = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    gaps_n = hardest_log1m_margins(cached, LogitTransform(scale, power, bias))[robust_B]
    cutoffs_L = gaps_n.sort().values.clamp(max=0)
    assert torch.equal(gaps_n <= (cutoffs_L + 1e-12 + 1e-9 * cutoffs_L.abs())[:, None], counted_Ln)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.985, 1.0])
def test_interpolated_criterion_uses_numpys_percentile(beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    attacked_BK = torch.randn(37, 6, generator=generator, dtype=torch.float64)
    wrong_BK = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    criterion = InterpolatedPaperCriterion.of(attacked_BK, wrong_BK, clamp="gelu", ln_k=None)
    grid = Grid((0.7, 2.0), (1.0, 2.5), (-1.0, 0.0), (beta,))
    scores = score_candidates(criterion, grid)
    found = zip(grid, scores.log_thresholds.flatten().tolist(), scores.counts.flatten().tolist(), strict=True)
    for at, log_threshold, count in found:
        margins, wrong = (
            top2_margin(LogitTransform(*at)(x_BK).softmax(dim=1)).numpy() for x_BK in (attacked_BK, wrong_BK)
        )
        threshold = np.percentile(margins, 100 * (1 - beta))
        assert -math.expm1(log_threshold) == pytest.approx(threshold, rel=1e-9, abs=1e-12)
        assert abs(wrong - threshold).min() > 1e-9
        assert count == int((wrong >= threshold).sum())


def test_grid_widens_until_the_optimum_is_inside_or_at_a_limit() -> None:
    criterion = ExactCriterion.from_rows(random_rows(), clamp="gelu", ln_k=None)
    narrow = Grid((0.1, 0.2), (1.0, 1.5), (-0.1, 0.0), (1.0, 0.9))
    plain, widened = (search_grid(criterion, narrow, n_widen=n) for n in (0, 16))
    assert plain.grid == narrow
    assert plain.for_beta(0.9).on_grid_edge
    assert 1 <= widened.grid.widenings < 16
    assert set(narrow) < set(widened.grid)
    for beta in narrow.betas:
        choice = widened.for_beta(beta)
        assert choice.objective_count >= plain.for_beta(beta).objective_count
        for name in choice.on_grid_edge:
            assert widened.grid.beyond(AXES[name], getattr(choice, name)) == (), "only a limit stops it"


def test_grid_wider_grows_at_edges_within_the_limits() -> None:
    grid = Grid((0.1, 1.0, 10.0), (1.0, 2.0, 4.0), (-2.0, -1.0, 0.0), (1.0, 0.9))
    wider = grid.wider((10.0, 2.0, -2.0))
    assert wider is not None and wider.widenings == 1
    assert wider.scales == (0.1, 1.0, 10.0, pytest.approx(100.0))
    assert (wider.powers, wider.biases) == (grid.powers, (-3.0, -2.0, -1.0, 0.0))
    assert grid.wider((1.0, 2.0, -1.0)) is None
    assert replace(grid, powers=(1.0, 16.0)).wider((1.0, 16.0, -1.0)) is None

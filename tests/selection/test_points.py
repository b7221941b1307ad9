"""Several adversarial examples of an image: the search keeps the image at its hardest one."""

from dataclasses import replace

import pytest
import torch

from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.inputs import AttackedPoints
from mixednuts_dist.selection.kernel import Slab
from mixednuts_dist.selection.prediction import hardest_log1m_margins
from tests.helpers.random_logits import GRID, exact, random_rows, with_points


def test_repeated_points_change_nothing() -> None:
    cached = random_rows()
    points = AttackedPoints(cached.rob_attacked_BK.repeat(2, 1), torch.arange(300) % 150, cached.labels_B.repeat(2))
    one, other = exact(cached), exact(cached, points)
    torch.testing.assert_close(one.log_one_minus_cutoffs, other.log_one_minus_cutoffs, rtol=1e-12, atol=0)
    assert torch.equal(one.objectives.nan_to_num(), other.objectives.nan_to_num())
    assert torch.equal(one.kept, other.kept)


def test_point_on_which_rob_is_wrong_loses_its_image() -> None:
    cached = random_rows()
    kept = (cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B).nonzero().squeeze(1)
    broken = cached.rob_attacked_BK[kept[:3]].clone()
    broken[torch.arange(3), cached.labels_B[kept[:3]]] = -9
    selection = exact(cached, AttackedPoints(broken, kept[:3], cached.labels_B[kept[:3]]), clamp="linear")
    assert selection.criterion.n_attacked == len(kept)
    assert bool(selection.infeasible[0].all())  # beta = 1 is infeasible
    assert int(selection.kept[2].max()) <= len(kept) - 3


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

"""Costs are sums of summaries."""

import pytest

from mixednuts_dist.reports.results import stage_costs
from tests.helpers.made_up_run import made_up_summaries


def test_devices_are_billed_by_what_was_held() -> None:
    (cost,) = stage_costs({"attack": made_up_summaries("attack"), "evaluate": []}, {"attack": 600.0})
    assert cost.gpu_hours == pytest.approx((0.5 * 1800 + 0.5 * 900) / 3600)
    assert cost.core_hours == pytest.approx(4 * 360 / 3600)
    assert (cost.images, cost.partitions, cost.nodes) == (300, 3, 2)
    assert cost.devices == ("NVIDIA H200", "cpu")
    assert cost.images_per_second == 0.5
    assert (cost.n_forward, cost.n_backward) == (11_700, 9_600)


def test_a_stage_that_was_taken_over_has_no_rate() -> None:
    (cost,) = stage_costs({"attack": made_up_summaries("attack")}, {})
    assert cost.wall_seconds is None
    assert cost.images_per_second is None
    assert cost.gpu_hours == 0.375

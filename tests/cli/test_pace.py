"""Speed, time left and hours, computed from summaries alone."""

import pytest

from mixednuts_dist.cli.status import WINDOW_SECONDS, pace_of
from mixednuts_dist.storage.records import PartitionSummary


def summary(start: int, stop: int, finished: float, seconds: float, **changes: object) -> PartitionSummary:
    fields = {"n_forward": 0, "n_backward": 0, "node": "a", "clean_correct": 0, "robust": 0, **changes}
    return PartitionSummary(
        stage="attack", partition=0, start=start, stop=stop, seconds=seconds, finished=finished, **fields
    )


def test_pace_counts_recent_images() -> None:
    now = 10_000.0
    old = summary(0, 100, now - WINDOW_SECONDS - 1, 50.0)
    lately = [summary(100, 110, now - 60, 40.0), summary(110, 120, now - 20, 30.0)]
    pace = pace_of([old, *lately], 220, now)
    assert pace.images_per_second == pytest.approx(20 / 100)
    assert pace.seconds_left == pytest.approx(100 / 0.2)
    assert pace.last_finished_seconds_ago == 20
    assert pace.core_hours == pytest.approx(120 / 3600)
    assert pace.core_hours_left == pytest.approx(120 / 3600 * 100 / 120)
    assert pace.gpu_hours == pace.gpu_hours_left == 0


def test_shares_of_an_accelerator_count_as_what_they_are() -> None:
    held = [summary(0, 10, 1.0, 3600.0, device="H200", n_devices=0.5), summary(10, 20, 1.0, 3600.0, n_devices=4.0)]
    pace = pace_of(held, 40, 2.0)
    assert (pace.gpu_hours, pace.core_hours) == (0.5, 4.0)
    assert (pace.gpu_hours_left, pace.core_hours_left) == (0.5, 4.0)


def test_a_run_without_workers_has_an_age_and_no_speed() -> None:
    pace = pace_of([summary(0, 10, 1000.0, 5.0)], 20, 1000.0 + 2 * WINDOW_SECONDS)
    assert pace.images_per_second is None
    assert pace.seconds_left is None
    assert pace.last_finished_seconds_ago == 2 * WINDOW_SECONDS
    nothing = pace_of([], 20, 1000.0)
    assert (nothing.last_finished_seconds_ago, nothing.images_left) == (None, 20)


def test_pace_ignores_clocks_that_are_ahead() -> None:
    ahead = [summary(0, 10, 1000.0 + 1190.0, 5.0), summary(10, 20, 1000.0 + 1200.0, 5.0)]
    pace = pace_of(ahead, 40, 1000.0)
    assert pace.images_per_second == pytest.approx(20 / 15)
    assert pace.last_finished_seconds_ago == 0

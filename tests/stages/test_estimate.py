"""The estimate's passes are those that the attacks really take, and its seconds are of real passes."""

from typing import Any

import pytest

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.stages import attack, estimate, search
from mixednuts_dist.stages.stage import attack_passes
from tests.helpers.runs import MakeConfig


def test_the_published_budget_takes_the_published_passes() -> None:
    # pyautoattack's own count is (111, 101), (928, 909), (1837, 900) and (5012, 0), its verifications included.
    counted = {"apgd-ce": (101, 101), "apgd-t": (909, 909), "fab-t": (1800, 900), "square": (5001, 0)}
    for name, (forward, backward) in counted.items():
        assert attack_passes((name,), AttackBudget(), 10) == (forward + 3, backward)


def test_an_estimate_gets_closer_with_what_is_finished(
    tiny: MakeConfig, ray_executor: Any, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    before = estimate.run(config, executor=ray_executor)
    assert before.unit == "core"
    assert before.n_workers == 2
    assert [(stage.stage, stage.images_left) for stage in before.stages] == [("attack", 24), ("evaluate", 24)]
    for seconds in before.pass_seconds.values():
        assert 0 < seconds.forward < 1
        assert 0 < seconds.both < 1
    assert all(stage.at_most > 0 for stage in before.stages)
    attack.run(config, executor=local_executor)
    monkeypatch.setattr(ray_executor, "time_passes", lambda *_: before.pass_seconds)
    attacked, evaluated = estimate.run(config, executor=ray_executor).stages
    assert (attacked.images_left, attacked.at_most) == (0, 0)
    assert evaluated.at_most > 0


def test_estimate_contains_rounds_until_the_choice(tiny: MakeConfig, local_executor: Any) -> None:
    base = tiny()
    config = base.with_changes(search=base.search.with_changes(rounds=4))
    before = estimate.run(config, executor=local_executor)
    assert [stage.stage for stage in before.stages] == ["attack", "search", "evaluate"]
    rounds = before.stages[1]
    assert rounds.images_left == 12  # half of the images
    each = before.pass_seconds["mixed"].of(*rounds.passes)
    assert rounds.at_most == pytest.approx(24 * each * (0.5 + 3 * 0.25))
    attack.run(config, executor=local_executor)
    search.run(config, executor=local_executor)
    assert [stage.stage for stage in estimate.run(config, executor=local_executor).stages] == ["attack", "evaluate"]

"""The estimate's passes are those that the attacks really take, and its seconds are of real passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.minimum_margin import minimum_margin_attack
from mixednuts_dist.cli.sizing import estimate_json
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.stages import attack, estimate, search
from mixednuts_dist.stages.stage import attack_passes

THREAT = ThreatModel("Linf", 0.01)


class Unbreakable(nn.Module):
    """Far too sure of class 0 for any attack, yet with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.01, 0.01, 16 * 5).reshape(5, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + torch.tensor([8.0, 0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(("n_iter", "n_targets"), [(5, 2), (20, 9)])
def test_the_attacks_passes_of_a_surviving_image(n_iter: int, n_targets: int) -> None:
    found = minimum_margin_attack(
        Unbreakable().eval(), torch.rand(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64), threat=THREAT,
        n_iter=n_iter, n_target_classes=n_targets, border_restarts=0, precision="fp32",
    )  # fmt: skip
    assert not found.broken.any()
    forward, backward = attack_passes(("apgd-ce", "apgd-t"), AttackBudget(n_iter, n_targets), 5)
    verdicts = 1 + min(n_targets, 4)  # one per run
    assert found.n_forward == pytest.approx(8 * (forward + verdicts), abs=16)
    assert found.n_backward == pytest.approx(8 * backward, abs=8)


@pytest.mark.parametrize("attacks", [("apgd-ce", "apgd-t"), ("fab-t",), ("square",)])
def test_the_ensembles_passes_of_a_surviving_image(attacks: tuple[Any, ...]) -> None:
    budget = AttackBudget(n_iter=10, n_target_classes=2, n_queries=50)
    mixed = MixedClassifier(Unbreakable(), Unbreakable(), LogitTransform(1.0, 1.0, 0.0), 0.9).eval()
    outcome = autoattack(
        mixed, torch.rand(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64), threat=THREAT, attacks=attacks,
        budget=budget, precision="fp32",
    )  # fmt: skip
    assert outcome.robust.all()
    forward, _ = attack_passes(attacks, budget, 5)
    assert 0.8 * forward <= outcome.n_forward / 8 <= 1.05 * forward + 6


def test_the_published_budget_takes_the_published_passes() -> None:
    # pyautoattack's own count is (111, 101), (928, 909), (1837, 900) and (5012, 0), its verifications included.
    counted = {"apgd-ce": (101, 101), "apgd-t": (909, 909), "fab-t": (1800, 900), "square": (5001, 0)}
    for name, (forward, backward) in counted.items():
        assert attack_passes((name,), AttackBudget(), 10) == (forward + 3, backward)


def test_an_estimate_gets_closer_with_what_is_finished(
    tiny: Callable[..., RunConfig], ray_executor: Any, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    before = estimate.run(config, executor=ray_executor)
    assert before.unit == "core"
    assert before.n_workers == 2
    assert [(stage.stage, stage.images_left, stage.likely) for stage in before.stages] == [
        ("attack", 24, None),
        ("evaluate", 24, None),
    ]
    for seconds in before.pass_seconds.values():
        assert 0 < seconds.forward < 1
        assert 0 < seconds.both < 1
    assert all(stage.at_most > 0 for stage in before.stages)
    attack.run(config, executor=local_executor)
    monkeypatch.setattr(ray_executor, "time_passes", lambda *_: before.pass_seconds)
    after = estimate_json(estimate.run(config, executor=ray_executor))
    assert after["stages"][0]["images_left"] == 0
    assert after["stages"][0]["at_most"]["hours"] == 0
    assert 0 < after["stages"][1]["likely"]["hours"] <= after["stages"][1]["at_most"]["hours"]
    assert "the same images as rob" in after["stages"][1]["basis"]


def test_estimate_contains_rounds_until_the_choice(tiny: Callable[..., RunConfig], local_executor: Any) -> None:
    base = tiny()
    config = base.with_changes(search=base.search.with_changes(rounds=4))
    before = estimate.run(config, executor=local_executor)
    assert [stage.stage for stage in before.stages] == ["attack", "search", "evaluate"]
    rounds = before.stages[1]
    assert rounds.images_left == 12 and rounds.likely is None  # half of the images
    each = before.pass_seconds["mixed"].of(*rounds.passes)
    assert rounds.at_most == pytest.approx(24 * each * (0.5 + 3 * 0.25))
    attack.run(config, executor=local_executor)
    attacked = estimate.run(config, executor=local_executor).stages[1]
    assert attacked.likely is not None and 0 < attacked.likely < attacked.at_most
    search.run(config, executor=local_executor)
    assert [stage.stage for stage in estimate.run(config, executor=local_executor).stages] == ["attack", "evaluate"]

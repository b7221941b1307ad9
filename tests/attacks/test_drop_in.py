"""The class AutoAttack has the interface of the autoattack package, and RobustBench's benchmark() runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mixednuts_dist as mn
from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.errors import InvalidInputError

QUICK = mn.AttackBudget(n_iter=4, n_target_classes=2, n_queries=10)
THREAT = mn.ThreatModel("Linf", 0.1)


@pytest.fixture
def digits() -> tuple[Any, torch.Tensor, torch.Tensor]:
    return (mn.load_classifier("demo:rob", "rob"), *mn.open_dataset("digits").read(0, 12))


def test_drop_in_equals_the_function(digits, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, x, y = digits
    adversary = mn.AutoAttack(model, norm="Linf", eps=0.1, version="standard", device="cpu", budget=QUICK)
    adversary.log_path = tmp_path / "log.txt"
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=250, return_labels=True)
    found = mn.autoattack(model, x, y, threat=THREAT, budget=QUICK)
    assert torch.equal(model(x_adv).argmax(dim=1) == y, found.robust)
    assert torch.equal(x_adv[found.robust], x[found.robust])
    assert torch.equal(labels, model(x_adv).argmax(dim=1))
    assert capsys.readouterr().out == adversary.log_path.read_text() == f"{found}\n"
    assert adversary.clean_accuracy(x, y) == found.clean_accuracy


def test_drop_in_runs_each_attack_alone(digits) -> None:
    model, x, y = digits
    adversary = mn.AutoAttack(model, norm="L2", eps=0.5, version="plus", verbose=False, budget=QUICK)
    adversary.attacks_to_run = ["apgd-ce", "square"]
    found = adversary.run_standard_evaluation_individual(x, y, bs=8)
    assert list(found) == ["apgd-ce", "square"] == adversary.attacks_to_run
    for x_adv in found.values():
        assert float((x_adv - x).flatten(1).norm(dim=1).max()) <= 0.5 * (1 + 1e-5)


def test_drop_in_refuses_what_it_cannot_do(digits) -> None:
    model, x, y = digits
    with pytest.raises(InvalidInputError, match="version='custom'"):
        mn.AutoAttack(model, attacks_to_run=["square"])
    with pytest.raises(InvalidInputError, match="state_path='state' is not supported"):
        mn.AutoAttack(model, eps=0.1).run_standard_evaluation(x, y, state_path=Path("state"))
    with pytest.raises(InvalidInputError, match="'plsu'"):
        mn.AutoAttack(model, version="plsu")
    with pytest.raises(AttributeError, match=r"no attribute 'apgd': set .* by budget=AttackBudget"):
        mn.AutoAttack(model, eps=0.1).apgd.n_restarts = 1


def test_robustbench_benchmark_runs_with_the_drop_in(digits, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = digits
    theirs = import_robustbench("robustbench.eval")
    monkeypatch.setattr(theirs, "AutoAttack", lambda *given, **options: mn.AutoAttack(*given, **options, budget=QUICK))
    monkeypatch.setattr(theirs, "load_clean_dataset", lambda *_: (x, y))
    clean, robust = theirs.benchmark(
        model, n_examples=12, dataset="cifar10", threat_model="Linf", eps=0.1, to_disk=False
    )
    found = mn.autoattack(model, x, y, threat=THREAT, budget=QUICK)
    assert (clean, robust) == pytest.approx((found.clean_accuracy, found.robust_accuracy))

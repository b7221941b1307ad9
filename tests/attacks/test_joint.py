"""The joint attack: its loss, its budget, and images that only it breaks."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.attack import Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import MixedOutputs
from mixednuts_dist.attacks.joint import JointState, JointSteps, joint
from mixednuts_dist.attacks.plans import passes_of
from mixednuts_dist.classifiers.factories import demo_rob, demo_std
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import IdentityTransform, LogitTransform
from tests.helpers.small_nets import tiny_mixture
from tests.helpers.stepping import started

THREAT = ThreatModel("Linf", 0.15)


@pytest.fixture(scope="module")
def mixed() -> MixedClassifier:
    """A mixed classifier whose margins are close to 0 or 1, which is the hardest case for gradients."""
    transform = LogitTransform(50.0, 2.5, -5 / 7)
    return MixedClassifier(demo_std(), demo_rob(), transform, 0.9337, surrogate_alpha=0.977)


def joint_loss(std_BK: Tensor, mapped_BK: Tensor, labels: Tensor, targets: Tensor, weight: float) -> Tensor:
    outputs = MixedOutputs(tiny_mixture(transform=IdentityTransform()), "transfer", std_BK, mapped_BK)
    state = JointState.of(torch.zeros(len(labels), 1, 1, 1, dtype=torch.float64))
    state.labels, state.targets, state.weight = labels, targets, torch.full_like(state.weight, weight)
    return JointSteps(THREAT).loss(state, outputs)


def test_the_loss_is_what_decides_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    std, mapped = (3 * torch.randn(200, 5, generator=generator).double() for _ in range(2))
    labels = torch.randint(5, (200,), generator=generator)
    targets = (labels + 1 + torch.randint(4, (200,), generator=generator)) % 5
    rows, probs = torch.arange(200), mapped.softmax(dim=1)
    gap = probs[rows, labels] - probs[rows, targets]
    loss = joint_loss(std, mapped, labels, targets, 16.0)
    votes = std.argmax(dim=1) == targets
    assert 0 < int(votes.sum()) < 200
    assert torch.allclose(loss[votes], (1 - gap[votes]).log())
    assert bool((loss[~votes] < (1 - gap[~votes]).log()).all())


@pytest.mark.parametrize("n_classes", [2, 3])
def test_joint_loss_is_finite_on_saturated_logits(n_classes: int) -> None:
    certain = (1e6 * torch.eye(n_classes)[:1]).double().requires_grad_()
    loss = joint_loss(certain, certain, torch.tensor([0]), torch.tensor([1]), 256.0)
    (grad,) = torch.autograd.grad(loss.sum(), certain)
    assert math.isfinite(float(loss.detach()))
    assert bool(torch.isfinite(grad).all())
    assert bool(grad.any())


def test_joint_attack_breaks_images_that_apgd_does_not_break(mixed: MixedClassifier) -> None:
    borderline = [199, 209, 236, 351, 524, 726]
    x, y = (values[borderline] for values in open_dataset("digits").read(0, 899))
    options = {"threat": THREAT, "attacks": ("apgd-ce", "apgd-t"), "sample_ids": borderline}
    budgets = [AttackBudget(n_iter=40, n_target_classes=3, joint_starts=restarts) for restarts in (0, 1)]
    paper, joint = (autoattack(mixed, x, y, budget=budget, **options) for budget in budgets)
    assert not bool((joint.robust & ~paper.robust).any())
    assert int(joint.robust.sum()) < int(paper.robust.sum())
    assert torch.equal(joint.robust, mixed(joint.x_adv).argmax(dim=1) == y)
    assert joint.n_forward > paper.n_forward


def test_a_run_begins_at_the_best_point_if_it_says_so(mixed: MixedClassifier) -> None:
    x, _ = open_dataset("digits").read(0, 4)
    run = joint(Setting(THREAT, AttackBudget(), 10, model=mixed))[0]
    for from_best in (True, False):
        begun = started(replace(run, from_best=from_best), x)
        begun.best = (x + 0.01).clamp(max=1)
        state = run.stepper.init(x)
        run.stepper.start(state, torch.arange(4), begun)
        assert torch.equal(run.stepper.ask(state), begun.best) == from_best


def test_all_runs_together_take_no_more_passes_than_apgd_t(mixed: MixedClassifier) -> None:
    for n_iter in (10, 30, 100):
        budget = AttackBudget(n_iter=n_iter)
        runs = joint(Setting(THREAT, budget, 10, model=mixed))
        assert len(runs) >= 9
        assert sum(run.stepper.n_iter + 1 for run in runs) == passes_of("joint", budget, 10)[1] <= 9 * (n_iter + 1)

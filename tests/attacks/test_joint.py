"""The joint attack: its loss, and that it breaks what the surrogate's gradients leave standing."""

import math

import pytest
import torch

from mixednuts_dist.attacks import joint as joint_attack
from mixednuts_dist.attacks.adaptive import adaptive_autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.joint import CLOSING_WEIGHTS
from mixednuts_dist.attacks.losses import joint_loss
from mixednuts_dist.classifiers.demo_classifiers import demo_rob, demo_std
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.margins import signed_margin
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.threat import ThreatModel

THREAT = ThreatModel("Linf", 0.15)


@pytest.fixture(scope="module")
def mixed() -> MixedClassifier:
    """The mixture of the digits that is hardest to climb on: its margins are close to 0 or 1."""
    transform = LogitTransform(50.0, 2.5, -5 / 7)
    return MixedClassifier(demo_std(), demo_rob(), transform, 0.9337, surrogate_alpha=0.977)


def test_the_loss_is_what_decides_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    std, mapped = (3 * torch.randn(200, 5, generator=generator).double() for _ in range(2))
    labels = torch.randint(5, (200,), generator=generator)
    targets = (labels + 1 + torch.randint(4, (200,), generator=generator)) % 5
    rows, probs = torch.arange(200), mapped.softmax(dim=1)
    gap = probs[rows, labels] - probs[rows, targets]
    loss = joint_loss(std, mapped, labels, targets, torch.full((200,), 16.0))
    votes = std.argmax(dim=1) == targets
    assert 0 < int(votes.sum()) < 200
    assert torch.allclose(loss[votes], 16 * (1 - gap[votes]).log())
    assert bool((loss[~votes] < 16 * (1 - gap[~votes]).log()).all())


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_loss_is_finite_with_finite_gradients_where_everything_saturates(n_classes: int) -> None:
    certain = (1e6 * torch.eye(n_classes)[:1]).double().requires_grad_()
    loss = joint_loss(certain, certain, torch.tensor([0]), torch.tensor([1]), torch.tensor([256.0]))
    (grad,) = torch.autograd.grad(loss.sum(), certain)
    assert math.isfinite(float(loss.detach()))
    assert bool(torch.isfinite(grad).all())
    assert bool(grad.any())


def test_it_breaks_images_that_the_papers_attack_leaves_standing(mixed: MixedClassifier) -> None:
    x, y = open_dataset("digits").read(0, 899)
    chosen = torch.tensor(DIGITS)
    x, y = x[chosen], y[chosen]
    outcomes = {}
    for restarts in (0, 1):
        budget = AttackBudget(n_iter=40, n_target_classes=3, border_restarts=restarts)
        outcomes[restarts] = adaptive_autoattack(
            mixed, x, y, threat=THREAT, attacks=("apgd-ce", "apgd-t"), sample_ids=DIGITS, budget=budget
        )
    paper, joint = outcomes[0], outcomes[1]
    assert not bool((joint.robust & ~paper.robust).any())
    assert int(joint.robust.sum()) < int(paper.robust.sum())
    assert torch.equal(joint.robust, mixed(joint.x_adv).argmax(dim=1) == y)
    assert joint.n_forward > paper.n_forward


def test_it_goes_on_from_the_best_points(mixed: MixedClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What random starts leave standing comes nearer to the border, or falls."""
    x, y = open_dataset("digits").read(0, 899)
    chosen = [445, 458, 502, 855]
    x, y = x[chosen], y[chosen]
    margins = []
    for weights in ((), CLOSING_WEIGHTS):
        monkeypatch.setattr(joint_attack, "CLOSING_WEIGHTS", weights)
        outcome = adaptive_autoattack(
            mixed, x, y, threat=THREAT, attacks=("apgd-ce", "apgd-t"), sample_ids=chosen,
            budget=AttackBudget(n_iter=40, n_target_classes=3, border_restarts=1),
        )  # fmt: skip
        margins.append(signed_margin(outcome.logits, y))
    assert bool((margins[1] <= margins[0]).all())
    assert bool((margins[1] < margins[0]).any())


def test_its_outcome_follows_the_image(mixed: MixedClassifier) -> None:
    x, y = open_dataset("digits").read(0, 899)
    found = []
    for order, batch_size in ((DIGITS, 64), (DIGITS[::-1], 4)):
        index = torch.tensor(order)
        budget = AttackBudget(n_iter=15, n_target_classes=3, border_restarts=1)
        outcome = adaptive_autoattack(
            mixed, x[index], y[index], threat=THREAT, attacks=("apgd-t",), sample_ids=order, budget=budget,
            batch_size=batch_size, precision="fp32",
        )  # fmt: skip
        found.append(dict(zip(order, outcome.logits.tolist(), strict=True)))
    for sample_id in DIGITS:
        assert found[0][sample_id] == pytest.approx(found[1][sample_id], abs=1e-4)


DIGITS = [199, 209, 236, 351, 524, 726]  # near the mixture's border

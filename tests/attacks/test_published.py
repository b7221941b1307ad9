"""FAB-T and Square on shapes and labels that the published code stumbles over; every pass is counted."""

import pytest
import torch
from torch import Tensor

from mixednuts_dist.attacks.adaptive import AttackBudget, autoattack
from mixednuts_dist.attacks.published_attacks import PassCount, fab_attack, on_canvas, square_attack
from mixednuts_dist.attacks.victim import Victim
from mixednuts_dist.threat import ThreatModel

from .conftest import images, small_net

QUICK = AttackBudget(n_iter=8, n_target_classes=3, n_queries=40, border_restarts=0)


@pytest.mark.parametrize("threat", [ThreatModel("Linf", 0.1), ThreatModel("L2", 1.0)], ids=str)
@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 9, 6), (1, 6, 13), (2, 3, 3)], ids=str)
def test_square_on_any_shape_stays_in_the_ball(threat: ThreatModel, shape: tuple[int, int, int]) -> None:
    net, x = small_net(5, shape), images(4, shape)
    y = net(x).argmax(dim=1)
    x_adv = square_attack(Victim.of(net), x, y, threat, 30, 0, range(4))
    assert x_adv.shape == x.shape
    delta = (x_adv - x).flatten(1)
    length = delta.abs().amax(dim=1) if threat.norm == "Linf" else delta.norm(dim=1)
    assert float(length.min()) > 0
    assert float(length.max()) <= threat.eps * (1 + 1e-5)
    assert float(x_adv.min()) >= 0
    assert float(x_adv.max()) <= 1


@pytest.mark.parametrize(("shape", "side"), [((32, 32), 32), ((14, 14), 15), ((9, 6), 9), ((3, 3), 5), ((8, 8), 8)])
def test_canvases_are_no_larger_than_they_must_be(shape: tuple[int, int], side: int) -> None:
    x = images(2, (1, *shape))
    canvas = on_canvas(x, "L2")
    assert canvas.shape == (2, 1, side, side)
    assert torch.equal(canvas[..., : shape[0], : shape[1]], x)
    assert on_canvas(x, "Linf") is x


def test_square_when_all_are_misclassified_tied_or_left_alone() -> None:
    net, x = small_net(3, (1, 6, 9)), images(3, (1, 6, 9))
    threat, labels = ThreatModel("Linf", 0.1), net(x).argmax(dim=1)
    wrong = square_attack(Victim.of(net), x, (labels + 1) % 3, threat, 20, 0, range(3))
    assert bool((net(wrong).argmax(dim=1) != (labels + 1) % 3).all())
    tied = Victim.of(lambda x: torch.zeros(len(x), 3))
    square_attack(tied, x, torch.zeros(3, dtype=torch.long), threat, 20, 0, range(3))
    assert square_attack(Victim.of(net), x[:1], labels[:1], threat, 20, 0, [2]).shape == (1, 1, 6, 9)


@pytest.mark.parametrize("n_classes", [2, 3, 4])
@pytest.mark.parametrize("attack", ["apgd-ce", "apgd-t", "fab-t", "square", "pgd-20"])
def test_every_attack_works_with_few_classes(attack: str, n_classes: int) -> None:
    net, x = small_net(n_classes, (1, 6, 9)), images(5, (1, 6, 9))
    y = net(x).argmax(dim=1)
    found = autoattack(net, x, y, threat=ThreatModel("Linf", 0.4), attacks=(attack,), budget=QUICK)
    assert bool((~found.robust).any())
    assert torch.equal(found.robust, net(found.x_adv).argmax(dim=1) == y)


@pytest.mark.parametrize("attack", ["fab-t", "square", "pgd-20"])
def test_every_pass_is_counted(attack: str) -> None:
    net, x = small_net(4, (1, 6, 9)), images(5, (1, 6, 9))
    seen = {"forward": 0, "backward": 0}

    def counting(x: Tensor) -> Tensor:
        seen["forward"] += len(x)
        logits: Tensor = net(x)
        if logits.requires_grad:
            logits.register_hook(lambda grad: seen.__setitem__("backward", seen["backward"] + len(grad)))
        return logits

    y = net(x).argmax(dim=1)
    found = autoattack(counting, x, y, threat=ThreatModel("Linf", 0.1), attacks=(attack,), budget=QUICK)
    assert (found.n_forward, found.n_backward) == (seen["forward"], seen["backward"])


def test_fab_on_a_constant_classifier_returns_no_nan() -> None:
    x = images(3, (1, 6, 9))
    constant = Victim.of(lambda x: torch.tensor([[2.0, 1.0, 0.0]]) + 0 * x.flatten(1).sum(dim=1, keepdim=True))
    x_adv = fab_attack(constant, x, torch.zeros(3, dtype=torch.long), ThreatModel("Linf", 0.1), 5, 2)
    assert bool(torch.isfinite(x_adv).all())


def test_counts_keep_the_rest_of_the_victim() -> None:
    victim = Victim.of(small_net(3, (1, 6, 9)))
    count = PassCount()
    watched = count.watched(victim)
    watched.judge(images(2, (1, 6, 9)))
    watched.climb_and_judge(images(3, (1, 6, 9)))
    assert (count.n_forward, count.n_backward) == (5, 3)
    assert watched.exact == victim.exact

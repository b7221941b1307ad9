"""FAB-T and Square on shapes and labels that the published code stumbles over; every pass is counted."""

import pytest
import torch

from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.attacks.published_attacks import Victim, fab_attack, on_canvas, square_attack
from mixednuts_dist.threat import ThreatModel

from .conftest import images, small_net


@pytest.mark.parametrize("threat", [ThreatModel("Linf", 0.1), ThreatModel("L2", 1.0)], ids=str)
@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 9, 6), (1, 6, 13), (2, 3, 3)], ids=str)
def test_square_on_any_shape_stays_in_the_ball(threat: ThreatModel, shape: tuple[int, int, int]) -> None:
    net, x = small_net(5, shape), images(4, shape)
    y = net(x).argmax(dim=1)
    x_adv = square_attack(Victim.of(AttackedModel.of(net)), x, y, threat, 30, 0, range(4))
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
    wrong = square_attack(Victim.of(AttackedModel.of(net)), x, (labels + 1) % 3, threat, 20, 0, range(3))
    assert bool((net(wrong).argmax(dim=1) != (labels + 1) % 3).all())
    tied = Victim.of(AttackedModel.of(lambda x: torch.zeros(len(x), 3)))
    square_attack(tied, x, torch.zeros(3, dtype=torch.long), threat, 20, 0, range(3))
    assert square_attack(Victim.of(AttackedModel.of(net)), x[:1], labels[:1], threat, 20, 0, [2]).shape == (1, 1, 6, 9)


def test_fab_on_a_constant_classifier_returns_no_nan() -> None:
    x = images(3, (1, 6, 9))
    constant = Victim.of(
        AttackedModel.of(lambda x: torch.tensor([[2.0, 1.0, 0.0]]) + 0 * x.flatten(1).sum(dim=1, keepdim=True))
    )
    x_adv = fab_attack(constant, x, torch.zeros(3, dtype=torch.long), ThreatModel("Linf", 0.1), 5, 2)
    assert bool(torch.isfinite(x_adv).all())

"""Red flags are raised for masked gradients, with counts, and for no sound classifier."""

import torch
from torch import Tensor

from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.stages.red_flags import FLAGS, findings, raised_flags
from tests.helpers.small_nets import images, small_net

SHAPE = (1, 6, 9)


def flags_of(attacked: AttackedModel, x: Tensor, y: Tensor, batch_size: int = 4) -> dict[str, Tensor]:
    return raised_flags(attacked, x, y, torch.zeros_like(y, dtype=torch.bool), batch_size=batch_size)


def test_nothing_is_raised_for_a_sound_classifier() -> None:
    net, x = small_net(5, SHAPE), images(6, SHAPE)
    raised = flags_of(AttackedModel.of(net), x, net(x).argmax(dim=1))
    assert tuple(raised) == FLAGS
    assert not any(bool(flag.any()) for flag in raised.values())
    assert findings(raised, 5, "rob") == []


def test_gradients_that_vanish_are_counted_image_by_image() -> None:
    net, x = small_net(5, SHAPE), images(6, SHAPE)
    dark = x[:, 0, 0, :1] < x[:, 0, 0, 0].median()

    def masked(x: Tensor) -> Tensor:
        logits: Tensor = net(x)
        return torch.where(dark[: len(x)], logits.detach(), logits)

    raised = flags_of(AttackedModel.of(masked), x, net(x).argmax(dim=1), batch_size=6)
    assert torch.equal(raised["no_gradient"], dark.squeeze(1))
    assert torch.equal(raised["no_climb"], dark.squeeze(1))
    n_dark = int(dark.sum())
    assert 0 < n_dark < 6
    first, second = findings(raised, 5, "rob")
    assert first.startswith(f"On {n_dark} of 6 images the gradient of rob's own cross-entropy is exactly zero")
    assert "only Square's result counts" in second


def test_masked_mixture_differs_from_its_surrogate() -> None:
    std, x = small_net(5, SHAPE, seed=1), images(4, SHAPE)
    hidden = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(54, 5))
    torch.nn.init.zeros_(hidden[1].weight)
    mixed = MixedClassifier(std, hidden, LogitTransform(1.0, 1.0, 0.0), 0.4)
    raised = flags_of(AttackedModel.of(mixed), x, mixed(x).argmax(dim=1))
    assert bool(raised["no_gradient"].all())
    assert not bool(raised["no_climb"].any())


def test_a_random_forward_is_noticed() -> None:
    net, x = small_net(5, SHAPE), images(6, SHAPE)
    generator = torch.Generator().manual_seed(0)
    noisy = AttackedModel.of(lambda x: net(x) + torch.randn(len(x), 5, generator=generator))
    raised = flags_of(noisy, x, net(x).argmax(dim=1))
    assert bool(raised["unrepeatable"].all())
    assert "6 of 6 images two passes of rob" in findings(raised, 5, "rob")[0]


def test_few_classes_are_mentioned() -> None:
    (sentence,) = findings({}, 3, "rob")
    assert "2 targets an image" in sentence

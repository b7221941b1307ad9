"""The embedded pair: what the README and the digits run rely on."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.factories import DEMO_EPS, demo_rob, demo_std
from mixednuts_dist.images.arrays import load_digits_split

N_PGD_ITERATIONS = 20


@pytest.fixture(scope="module")
def test_half() -> tuple[Tensor, Tensor]:
    return load_digits_split("test")


def accuracy(classifier: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((classifier(images).argmax(1) == labels).double().mean())


def pgd(classifier: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Plain PGD on the cross-entropy from the clean image: weaker than the attacks that the package runs."""
    adversarial = images.clone()
    for _ in range(N_PGD_ITERATIONS):
        adversarial.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(classifier(adversarial), labels), adversarial)
        moved = adversarial.detach() + DEMO_EPS / 8 * gradient.sign()
        adversarial = torch.clamp(moved, images - DEMO_EPS, images + DEMO_EPS).clamp(0, 1)
    return adversarial


def test_std_is_accurate_and_rob_noticeably_less_so(test_half: tuple[Tensor, Tensor]) -> None:
    std, rob = accuracy(demo_std(), *test_half), accuracy(demo_rob(), *test_half)
    assert std > 0.98
    assert 0.85 < rob < std - 0.05


def test_pgd_breaks_std_but_not_rob(test_half: tuple[Tensor, Tensor]) -> None:
    images, labels = test_half
    std, rob = demo_std(), demo_rob()
    assert accuracy(std, pgd(std, images, labels), labels) < 0.10
    assert accuracy(rob, pgd(rob, images, labels), labels) > 0.50


def test_the_second_robust_classifier_is_another_one(test_half: tuple[Tensor, Tensor]) -> None:
    images, labels = test_half
    light = load_classifier("demo:rob_light")
    assert accuracy(light, images, labels) > accuracy(demo_rob(), images, labels) + 0.03
    assert accuracy(light, pgd(light, images, labels), labels) > 0.50


def test_demo_noisy_is_accurate_under_noise(test_half: tuple[Tensor, Tensor]) -> None:
    images, labels = test_half
    moved = images + 0.25 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert accuracy(load_classifier("demo:noisy"), moved, labels) > max(accuracy(demo_rob(), moved, labels) + 0.05, 0.9)

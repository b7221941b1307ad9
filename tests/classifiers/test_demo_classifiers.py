"""The embedded pair: what the README and the digits run rely on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mixednuts_dist.classifiers import factories
from mixednuts_dist.classifiers.factories import DEMO_EPS, DigitsNet, demo_noisy, demo_rob, demo_rob_light, demo_std
from mixednuts_dist.errors import BaseClassifierError
from mixednuts_dist.images.arrays import load_digits_split

N_PGD_ITERATIONS = 20

every = pytest.mark.parametrize("factory", [demo_std, demo_rob, demo_rob_light, demo_noisy])


@pytest.fixture(scope="module")
def test_half() -> tuple[Tensor, Tensor]:
    return load_digits_split("test")


def accuracy(classifier: DigitsNet, images: Tensor, labels: Tensor) -> float:
    return float((classifier(images).argmax(1) == labels).double().mean())


def pgd(classifier: DigitsNet, images: Tensor, labels: Tensor) -> Tensor:
    """Plain PGD on the cross-entropy from the clean image: weaker than the attacks that the package runs."""
    adversarial = images.clone()
    for _ in range(N_PGD_ITERATIONS):
        adversarial.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(classifier(adversarial), labels), adversarial)
        moved = adversarial.detach() + DEMO_EPS / 8 * gradient.sign()
        adversarial = torch.clamp(moved, images - DEMO_EPS, images + DEMO_EPS).clamp(0, 1)
    return adversarial


@every
def test_logits_do_not_depend_on_the_rest_of_the_batch(
    factory: Callable[[], DigitsNet], test_half: tuple[Tensor, Tensor]
) -> None:
    classifier, images = factory(), test_half[0][:8]
    assert not any(module.training for module in classifier.modules())
    logits = classifier(images)
    assert logits.shape == (8, 10)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(classifier(images[3:4]), logits[3:4])


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
    light = demo_rob_light()
    assert accuracy(light, images, labels) > accuracy(demo_rob(), images, labels) + 0.03
    assert accuracy(light, pgd(light, images, labels), labels) > 0.50


def test_demo_noisy_is_accurate_under_noise(test_half: tuple[Tensor, Tensor]) -> None:
    images, labels = test_half
    moved = images + 0.25 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert accuracy(demo_noisy(), moved, labels) > max(accuracy(demo_rob(), moved, labels) + 0.05, 0.9)


def test_weights_of_other_widths_name_the_training_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factories, "STD_WIDTHS", (4, 8))
    with pytest.raises(BaseClassifierError, match=r"demo_std\.safetensors .* widths=\(4, 8\)(.|\n)*demo_training"):
        demo_std()

"""The embedded pair: what the README and the digits run rely on."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.factories import DEMO_EPS
from mixednuts_dist.images.arrays import load_digits_split

N_PGD_ITERATIONS = 20


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


def test_each_embedded_classifier_has_its_strength() -> None:
    images, labels = load_digits_split("test")
    nets = {name: load_classifier(f"demo:{name}") for name in ("std", "rob", "rob_light", "noisy")}
    clean = {name: accuracy(net, images, labels) for name, net in nets.items()}
    attacked = {name: accuracy(net, pgd(net, images, labels), labels) for name, net in nets.items()}
    moved = images + 0.25 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert clean["std"] > 0.98 and attacked["std"] < 0.10
    assert 0.85 < clean["rob"] < clean["std"] - 0.05 and attacked["rob"] > 0.50
    assert clean["rob_light"] > clean["rob"] + 0.03 and attacked["rob_light"] > 0.50
    assert accuracy(nets["noisy"], moved, labels) > max(accuracy(nets["rob"], moved, labels) + 0.05, 0.9)

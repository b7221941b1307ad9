"""The packaged classifiers: what the README and the digits run rely on."""

import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.factories import DEMO_EPS
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.arrays import load_digits_split


def accuracy(classifier: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((classifier(images).argmax(1) == labels).double().mean())


def test_each_embedded_classifier_has_its_strength() -> None:
    images, labels = load_digits_split("test")
    nets = {name: load_classifier(f"demo:{name}") for name in ("std", "rob", "rob_light", "noisy")}
    options = {"threat": ThreatModel("Linf", DEMO_EPS), "attacks": ("apgd-ce",), "budget": AttackBudget(20)}
    results = {name: autoattack(net, images, labels, **options) for name, net in nets.items()}
    clean = {name: result.clean_accuracy for name, result in results.items()}
    attacked = {name: result.robust_accuracy for name, result in results.items()}
    moved = images + 0.25 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert clean["std"] > 0.98 and attacked["std"] < 0.10
    assert 0.85 < clean["rob"] < clean["std"] - 0.05 and attacked["rob"] > 0.50
    assert clean["rob_light"] > clean["rob"] + 0.03 and attacked["rob_light"] > 0.50
    assert accuracy(nets["noisy"], moved, labels) > max(accuracy(nets["rob"], moved, labels) + 0.05, 0.9)

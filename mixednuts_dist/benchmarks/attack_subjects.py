"""Classifiers and images for the attack benchmark: real ones if they are available.

Shapes: B images of C x H x W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..classifiers.base_classifiers import load_classifier
from ..classifiers.checkpoints import import_quietly
from ..classifiers.robustbench_zoo import import_robustbench
from ..config.threat import ThreatModel
from ..errors import DatasetError, InvalidInputError
from ..images.datasets import open_dataset


@dataclass(frozen=True)
class Subject:
    """The classifier and its correctly classified images, which both packages attack."""

    network: nn.Module
    x: Tensor
    y: Tensor
    eps: float  # Linf
    description: str


def subject(model: str, data: str | None, n_images: int, device: torch.device, eps: float | None = None) -> Subject:
    """Return a classifier, named in `MODELS` or by a URI with its `eps`, and its first `n_images` correct images.

    `data` is a dataset URI; by default, CIFAR-10 if torchvision's files are present, and otherwise synthetic images. On
    synthetic images, and for a classifier with random weights, the predictions of the classifier are the labels.

    Raises:
        InvalidInputError: for an unknown model.
        DatasetError: for a dataset that cannot be read.
    """
    if model not in MODELS and (":" not in model or eps is None):
        names = ", ".join(MODELS)
        raise InvalidInputError(f"--model {model} is not known. Use {names}, or a classifier's URI with --eps")
    build, usual_eps, trained = MODELS.get(model) or (lambda: load_classifier(model, "rob"), 0.0, True)
    eps = eps or usual_eps
    network = build().eval().requires_grad_(False).to(device)
    x, y, source = _images(data)
    x = x.to(device)
    predicted = torch.cat([network(part).argmax(dim=1).cpu() for part in torch.split(x, 100)])
    if y is None or not trained:
        y, source = predicted, f"{source}, labeled by the classifier"
    right = (predicted == y).nonzero().squeeze(1)[:n_images]
    weights = "trained" if trained else "random"
    described = f"{model} ({weights} weights), {len(right)} images: {source}; {ThreatModel('Linf', eps)}"
    return Subject(network, x[right], y[right].to(device), eps, described)


def resnet18() -> nn.Module:
    """Return the CIFAR-10 classifier that pyautoattack includes, with 94.2% clean accuracy and without robustness."""
    module = import_quietly("pyautoattack.examples.resnet")
    network: nn.Module = module.ResNet18()
    weights = Path(str(module.__file__)).with_name("model_test.pt")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return network


def wide_resnet(depth: int, width: int) -> nn.Module:
    """Return a WideResNet as on RobustBench, with seeded random weights."""
    module = import_robustbench("robustbench.model_zoo.architectures.dm_wide_resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = module.DMWideResNet(depth=depth, width=width, activation_fn=nn.SiLU)
    return network


# At these radii, about half of the images remain robust, as on robust classifiers at 8/255.
MODELS: dict[str, tuple[Callable[[], nn.Module], float, bool]] = {
    "resnet-18": (resnet18, 0.75 / 255, True),
    "wrn-28-10": (lambda: wide_resnet(28, 10), 0.1 / 255, False),
    "wrn-70-16": (lambda: wide_resnet(70, 16), 0.1 / 255, False),
}


def _images(data: str | None) -> tuple[Tensor, Tensor | None, str]:
    try:
        dataset = open_dataset(data or "cifar10")
    except DatasetError:
        if data is not None:
            raise
        return _made_up(400), None, "synthetic (CIFAR-10 is not present)"
    x, y = dataset.read(0, min(2000, len(dataset)))
    return x, y, data or "CIFAR-10"


def _made_up(n: int) -> Tensor:
    """Return soft colored noise, (n, 3, 32, 32) in [0, 1]."""
    coarse = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(32, 32), mode="bicubic", align_corners=False).clamp(0, 1)

"""A linear classifier that counts the images it sees, and mixed classifiers made of two of them."""

import torch
from torch import Tensor, nn

from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitMap, LogitTransform

TRANSFORM = LogitTransform(0.6, 3.5, -1.1)


class CountingNet(nn.Module):
    """A linear classifier of 3 x 4 x 4 images that counts the images it sees."""

    def __init__(self, n_classes: int, seed: int, sharpness: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(48, n_classes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(n_classes, 48, generator=generator) * sharpness)
        self.n_seen = 0

    def forward(self, x_BCHW: Tensor) -> Tensor:
        self.n_seen += len(x_BCHW)
        out: Tensor = self.linear(x_BCHW.flatten(1))
        return out


def images(n: int = 16) -> Tensor:
    return torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def mixed(
    alpha: float = 0.9, n_classes: int = 10, transform: LogitMap = TRANSFORM, **settings: float
) -> MixedClassifier:
    return MixedClassifier(CountingNet(n_classes, 1, 2.0), CountingNet(n_classes, 2), transform, alpha, **settings)

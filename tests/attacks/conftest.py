"""Small classifiers with real curvature, and images for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


def small_net(n_classes: int, shape: tuple[int, int, int], seed: int = 0, sharpness: float = 4.0) -> nn.Module:
    """A seeded convolutional net whose logits move visibly within the balls of the tests."""
    channels, height, width = shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(8 * height * width, n_classes),
        )  # fmt: skip
        with torch.no_grad():
            net[-1].weight.mul_(sharpness)
    return net.eval().requires_grad_(False)


def images(n: int, shape: tuple[int, int, int], seed: int = 1) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def victim() -> Callable[..., tuple[nn.Module, Tensor, Tensor]]:
    """(model, x, y) with labels that the model gets right on the clean images."""

    def make(
        n: int = 12, n_classes: int = 10, shape: tuple[int, int, int] = (3, 8, 8), seed: int = 0
    ) -> tuple[nn.Module, Tensor, Tensor]:
        model, x = small_net(n_classes, shape, seed), images(n, shape)
        return model, x, model(x).argmax(dim=1)

    return make

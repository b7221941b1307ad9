"""Small classifiers with real curvature, images and threat models for them, and a small attack budget."""

import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitMap, LogitTransform

SHAPE = (3, 8, 8)
QUICK = AttackBudget(n_iter=10, n_target_classes=2, n_queries=60, joint_starts=1)
TRANSFORM = LogitTransform(0.6, 3.5, -1.1)
LINF, L2, L1 = ThreatModel("Linf", 0.08), ThreatModel("L2", 0.8), ThreatModel("L1", 8.0)


def small_net(n_classes: int, shape: tuple[int, int, int], seed: int = 0, sharpness: float = 4.0) -> nn.Module:
    """A seeded convolutional net whose logits move visibly within the balls of the tests."""
    channels, height, width = shape
    with torch.random.fork_rng(devices=[]):
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


class ShortOfMemory(nn.Module):
    """A network on a device with room for `room` images, after a number of calls without a limit."""

    def __init__(self, network: nn.Module, room: int, *, after: int = 0) -> None:
        super().__init__()
        self.network, self.room, self.calls_left, self.refused = network, room, after, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left < 0 and len(x) > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no room for {len(x)} images")
        logits: Tensor = self.network(x)
        return logits


class TinyNet(nn.Module):
    """A linear classifier of 3 x 4 x 4 images that counts the images it sees."""

    def __init__(self, n_classes: int, seed: int, sharpness: float = 1.0) -> None:
        super().__init__()
        self.linear, self.n_seen = nn.Linear(48, n_classes), 0
        with torch.no_grad():
            weight = torch.randn(n_classes, 48, generator=torch.Generator().manual_seed(seed))
            self.linear.weight.copy_(weight * sharpness)

    def forward(self, x: Tensor) -> Tensor:
        self.n_seen += len(x)
        logits: Tensor = self.linear(x.flatten(1))
        return logits


def tiny_images(n: int = 16) -> Tensor:
    return images(n, (3, 4, 4))


def tiny_mixture(
    alpha: float = 0.9, n_classes: int = 10, transform: LogitMap = TRANSFORM, **settings: float
) -> MixedClassifier:
    return MixedClassifier(TinyNet(n_classes, 1, 2.0), TinyNet(n_classes, 2), transform, alpha, **settings)


def mixture() -> MixedClassifier:
    std, rob = small_net(10, SHAPE, seed=1, sharpness=8), small_net(10, SHAPE, seed=0, sharpness=3)
    return MixedClassifier(std, rob, LogitTransform(2.0, 2.0, -0.5), 0.6, surrogate_alpha=0.8)

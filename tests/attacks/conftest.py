"""Small classifiers with real curvature, and images for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.attack import Arrivals, Attack, Phase, Seen
from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin

torch.set_num_threads(1)


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


@pytest.fixture
def victim() -> Callable[..., tuple[nn.Module, Tensor, Tensor]]:
    """(model, x, y) with labels that the model gets right on the clean images."""

    def make(
        n: int = 12, n_classes: int = 10, shape: tuple[int, int, int] = (3, 8, 8), seed: int = 0
    ) -> tuple[nn.Module, Tensor, Tensor]:
        model, x = small_net(n_classes, shape, seed), images(n, shape)
        return model, x, model(x).argmax(dim=1)

    return make


def arrivals(
    attack: Attack, x: Tensor, y: Tensor, *, phase: Phase | None = None, targets: Tensor | None = None
) -> Arrivals:
    """Images that begin the attack's first phase, with the ids 0, 1, ..."""
    phase = phase or attack.phases()[0]
    name = phase.name.format(rank=2)
    return Arrivals([phase] * len(x), x, x, y, y if targets is None else targets, [name] * len(x), range(len(x)))


def one_pass(attack: Attack, state: object, model: nn.Module, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One round of an attack by hand: (where it was evaluated, whose phase has ended)."""
    x_new = attack.propose(state).clone()
    leaf = x_new.clone().requires_grad_()
    outputs = AttackedModel.of(model).fast.run(leaf)
    value = attack.objective(state, outputs, labels, targets)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    logits = outputs.model_logits
    seen = Seen(
        logits, labels, targets, log_one_minus_signed_margin(logits, labels), logits.argmax(dim=1) != labels,
        value.detach(), grad,
    )  # fmt: skip
    return x_new, attack.absorb(state, attack.propose(state), seen)


def iterates(attack: Attack, model: nn.Module, x: Tensor, y: Tensor, targets: Tensor | None = None) -> list[Tensor]:
    """All points that the attack's first phase evaluates."""
    targets = y if targets is None else targets
    phase = attack.phases()[0]
    attack = phase.stepper
    state, seen = attack.state(x), []
    attack.begin(state, torch.arange(len(x)), arrivals(attack, x, y, phase=phase, targets=targets))
    ended = torch.zeros(len(x), dtype=torch.bool)
    while not bool(ended.all()):
        x_new, ended = one_pass(attack, state, model, y, targets)
        seen.append(x_new)
    return seen

"""straight_through finds the modules that cut the gradient and breaks what a hand-written BPDA breaks."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.fft import dct
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.classifiers.straight_through import straight_through
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform
from tests.helpers.small_nets import images, small_net

SHAPE, OPTIONS = (3, 8, 8), {"threat": ThreatModel("Linf", 0.05), "attacks": ("apgd-ce", "apgd-t")}
QUICK = AttackBudget(n_iter=15, n_target_classes=2)
pytestmark = pytest.mark.filterwarnings("ignore:the gradient of the model is zero")


def rounded(x: Tensor) -> Tensor:
    return (16 * x).round() / 16


def jpeg(x: Tensor) -> Tensor:
    """8 x 8 blocks to frequencies, those rounded, coarser the higher they are, and back."""
    d = torch.from_numpy(dct(np.eye(8, dtype=np.float32), axis=0, norm="ortho"))
    steps = 0.05 * (1 + torch.arange(8.0)[:, None] + torch.arange(8.0))
    return d.T @ ((d @ x @ d.T) / steps).round().mul(steps) @ d


class Module(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InForward(Module):
    """A function as code before a network, perhaps with a handwritten identity as its backward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor], by_hand: bool = False, shape=SHAPE) -> None:
        super().__init__(function)
        self.net, self.by_hand = small_net(10, shape), by_hand

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + (self.function(x) - x).detach() if self.by_hand else self.function(x))


# Written as: (the classifier of a function and a network, where the gradient stops)
WRITTEN = {
    "module": (lambda f: nn.Sequential(Module(f), small_net(10, SHAPE)), {"output of 0": "input of 0"}),
    "forward": (InForward, {"input of net": "input of "}),
    "layers": (
        lambda f: nn.Sequential(
            nn.Sequential(Module(lambda x: 2 * x), Module(lambda x: f(x / 2)), nn.Identity()), small_net(10, SHAPE)
        ),
        {"output of 0.1": "input of 0.1"},
    ),
}


@pytest.mark.parametrize("function", [rounded, jpeg], ids=["rounded pixels", "JPEG-like"])
@pytest.mark.parametrize("written", WRITTEN)
def test_straight_through_reaches_90_percent_of_a_manual_bpda(function, written: str) -> None:
    make, where = WRITTEN[written]
    model = make(function)
    x = images(24, SHAPE)
    y = model(x).argmax(dim=1)
    opened = straight_through(model)
    blind, found, by_hand = (
        autoattack(net, x, y, budget=QUICK, **OPTIONS) for net in (model, opened, InForward(function, by_hand=True))
    )
    assert opened.cuts == where
    drop = len(x) - int(by_hand.robust.sum())
    assert drop > 12
    assert len(x) - int(found.robust.sum()) >= 0.9 * drop
    assert int(blind.robust.sum()) - int(found.robust.sum()) >= 0.5 * drop, "the plain attack was not blind"
    assert torch.equal(found.robust, model(found.x_adv).argmax(dim=1) == y)
    assert float((found.x_adv - x).abs().max()) <= 0.05 * (1 + 1e-5)


def test_straight_through_changes_nothing_without_cuts(victim) -> None:
    model, x, y = victim(n=6)
    opened = straight_through(model)
    plain, through = (autoattack(net, x, y, budget=QUICK, precision="fp32", **OPTIONS) for net in (model, opened))
    assert opened.cuts == {}
    assert torch.equal(plain.robust, through.robust)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_straight_through_opens_both_base_classifiers() -> None:
    std, rob = InForward(rounded), nn.Sequential(Module(rounded), small_net(10, SHAPE, seed=2))
    mixed = MixedClassifier(std.eval(), rob.eval(), LogitTransform(1.0, 1.0, 0.0), alpha=0.6, temperature=1.0)
    x, opened = images(3, SHAPE), straight_through(mixed)
    assert isinstance(opened, MixedClassifier)
    assert torch.equal(opened(x), mixed(x))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(opened.surrogate_logits(leaf)[:, 0].sum(), leaf)
    assert bool(grad.flatten(1).any(dim=1).all())


def test_straight_through_refuses_a_function() -> None:
    with pytest.raises(InvalidInputError, match="the model is a function"):
        straight_through(rounded)  # type: ignore[arg-type]


class Between(nn.Module):
    """Code that cuts the gradient between its children: after the first layer or before the linear one."""

    def __init__(self, flattened: bool) -> None:
        super().__init__()
        net = small_net(10, SHAPE)
        self.unused, self.stem, self.middle, self.last = nn.Conv2d(3, 2, 1), net[:2], net[2:4], net[-1]
        self.flattened = flattened

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        h = self.stem(x)
        h = self.middle(h if self.flattened else (8 * h).round() / 8).flatten(1)
        return self.last((8 * h).round() / 8 if self.flattened else h)


def with_two_cuts() -> nn.Module:
    net = small_net(10, SHAPE)
    return nn.Sequential(Module(rounded), net[:2], Module(lambda x: (8 * x).round().div(8).detach()), net[2:])


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (with_two_cuts, {"output of 0": "input of 0", "output of 2": "input of 2"}),
        (lambda: Between(flattened=False), {"input of middle": "output of stem"}),
        (lambda: Between(flattened=True), {"input of last": "output of middle"}),
    ],
    ids=["two cuts", "between children", "between children, flattened"],
)
def test_straight_through_finds_cuts(make: Callable[[], nn.Module], where: dict[str, str]) -> None:
    model, x = make().eval().requires_grad_(False), images(8, SHAPE)
    opened, leaf = straight_through(model), x.clone().requires_grad_()
    logits = opened(leaf)
    (grad,) = torch.autograd.grad(logits[:, 0].sum(), leaf)
    assert opened.cuts == where
    assert torch.equal(logits, model(x))
    assert torch.equal(opened(x), model(x))
    assert bool(grad.flatten(1).any(dim=1).all())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_straight_through_leaves_cuts_between_other_shapes() -> None:
    model = InForward(lambda x: (x[:, :, ::2, ::2] > 0.5).float().repeat(1, 1, 1, 4), shape=(3, 4, 16))
    opened, x = straight_through(model), images(2, SHAPE)
    opened(x.requires_grad_())
    assert opened.cuts == {}
    with pytest.warns(UserWarning, match="gradient of the model is zero"):
        autoattack(opened, x.detach(), model(x).argmax(dim=1), budget=QUICK, **OPTIONS)

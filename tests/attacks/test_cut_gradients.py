"""Gradients that are cut: the module is found, and the attack through it drops what a hand-written BPDA drops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.cut_gradients import Cut, found_cuts, identity_backward
from mixednuts_dist.config.threat import ThreatModel
from tests.helpers.small_nets import images, small_net

SHAPE, OPTIONS = (3, 8, 8), {"threat": ThreatModel("Linf", 0.05), "attacks": ("apgd-ce", "apgd-t")}
QUICK = AttackBudget(n_iter=15, n_target_classes=2)
pytestmark = pytest.mark.filterwarnings("ignore:the gradient of the model is zero")


def rounded(x: Tensor) -> Tensor:
    return (16 * x).round() / 16


def dct_matrix() -> Tensor:
    k, n = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    rows = torch.cos(math.pi * k * (2 * n + 1) / 16) / 2
    rows[0] /= math.sqrt(2)
    return rows


def jpeg(x: Tensor) -> Tensor:
    """8 x 8 blocks to frequencies, those rounded, coarser the higher they are, and back."""
    d = dct_matrix()
    steps = 0.05 * (1 + torch.arange(8.0)[:, None] + torch.arange(8.0))
    return d.T @ ((d @ x @ d.T) / steps).round().mul(steps) @ d


class Module(nn.Module):
    """A layer of its own."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InForward(nn.Module):
    """The same as code of a wrapper's forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.net = function, small_net(10, SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.function(x))


class StraightThrough(nn.Module):
    """What one writes by hand."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.net = function, small_net(10, SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + (self.function(x) - x).detach())


@pytest.mark.parametrize("function", [rounded, jpeg], ids=["rounded pixels", "JPEG-like"])
@pytest.mark.parametrize("written", ["module", "forward"])
def test_nine_tenths_of_the_drop_of_a_hand_written_bpda(function, written: str) -> None:
    model = nn.Sequential(Module(function), small_net(10, SHAPE)) if written == "module" else InForward(function)
    x = images(24, SHAPE)
    y = model(x).argmax(dim=1)
    found = autoattack(model, x, y, budget=QUICK, **OPTIONS)
    by_hand = autoattack(StraightThrough(function), x, y, budget=QUICK, **OPTIONS)
    *_, blind, (name, left, _) = found.table()
    assert name == ("bpda (0)" if written == "module" else "bpda (the classifier before net)")
    drop = len(x) - int(by_hand.robust.sum())
    assert drop > 12
    assert len(x) - left >= 0.9 * drop
    assert blind[1] - left >= 0.5 * drop, "the gradient was cut, and the plain attack blind"
    assert torch.equal(found.robust, model(found.x_adv).argmax(dim=1) == y)
    assert float((found.x_adv - x).abs().max()) <= 0.05 * (1 + 1e-5)
    off = autoattack(model, x, y, budget=QUICK, bpda=False, **OPTIONS)
    assert list(off.survived) == ["apgd-ce", "apgd-t"]
    assert int(off.robust.sum()) == blind[1]


def test_a_classifier_that_cuts_nothing_is_attacked_once(victim) -> None:
    model, x, y = victim(n=6)
    assert found_cuts(model, x[:2]) == []
    with_it, without = (autoattack(model, x, y, budget=QUICK, bpda=bpda, **OPTIONS) for bpda in (True, False))
    assert torch.equal(with_it.x_adv, without.x_adv)
    assert (with_it.n_forward, with_it.n_backward) == (without.n_forward, without.n_backward)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_cuts_one_behind_the_other_are_all_found_and_the_hooks_leave_values_alone() -> None:
    net = small_net(10, SHAPE)
    model = nn.Sequential(Module(rounded), net[:2], Module(lambda x: (8 * x).round().div(8).detach()), net[2:])
    x = images(3, SHAPE)
    cuts = found_cuts(model, x)
    assert sorted(map(str, cuts)) == ["0", "2"]
    with identity_backward(model, cuts):
        leaf = x.clone().requires_grad_()
        logits = model(leaf)
        (grad,) = torch.autograd.grad(logits[:, 0].sum(), leaf)
        assert torch.equal(logits, model(x))
    assert torch.equal(logits, model(x))
    assert bool(grad.flatten(1).any(dim=1).all())


class Between(nn.Module):
    """Code that cuts behind a child: after the first layer, and once more on its way into the linear one."""

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


@pytest.mark.parametrize(
    ("flattened", "where"),
    [(False, "the classifier after stem before middle"), (True, "the classifier after middle before last")],
)
def test_code_behind_a_child_that_cuts_is_found_and_passed(flattened: bool, where: str) -> None:
    model, x = Between(flattened).eval().requires_grad_(False), images(8, SHAPE)
    cuts = found_cuts(model, x)
    assert [str(cut) for cut in cuts] == [where]
    with identity_backward(model, cuts):
        leaf = x.clone().requires_grad_()
        logits = model(leaf)
        (grad,) = torch.autograd.grad(logits[:, 0].sum(), leaf)
    assert torch.equal(logits, model(x))
    assert bool(grad.flatten(1).any(dim=1).all())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ToFrequencies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dct_matrix() @ x @ dct_matrix().T


class ToPixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dct_matrix().T @ x @ dct_matrix()


def test_of_a_defence_in_several_modules_the_one_that_rounds_is_named() -> None:
    """The identity then stands in the place of the rounding alone, among the frequencies."""
    quantise = Module(lambda x: (x / 0.2).round() * 0.2)
    jpeg_layer = nn.Sequential(ToFrequencies(), quantise, ToPixels())
    model, x = nn.Sequential(jpeg_layer, small_net(10, SHAPE)), images(16, SHAPE)
    assert [str(cut) for cut in found_cuts(model, x)] == ["0.1"]
    y = model(x).argmax(dim=1)
    found = autoattack(model, x, y, budget=QUICK, **OPTIONS)
    by_hand = autoattack(StraightThrough(jpeg_layer), x, y, budget=QUICK, **OPTIONS)
    assert len(x) - int(found.robust.sum()) >= 0.9 * (len(x) - int(by_hand.robust.sum())) > 8


def shrunk(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


def quantised(x: Tensor) -> Tensor:
    return (32 * shrunk(x)).round() / 32


def compared(x: Tensor) -> Tensor:
    """Which of a grey pixel's five levels it is nearest to, as five planes."""
    return F.one_hot((4 * x.mean(dim=1)).round().long(), 5).permute(0, 3, 1, 2).float()


def as_planes(x: Tensor) -> Tensor:
    return (1 - (4 * x.mean(dim=1, keepdim=True) - torch.arange(5.0).view(1, 5, 1, 1)).abs()).clamp(0, 1)


@pytest.mark.parametrize(
    ("function", "smooth", "shape"),
    [(quantised, shrunk, (3, 4, 4)), (compared, as_planes, (5, 8, 8))],
    ids=["a quantiser that shrinks", "the largest of five, as planes"],
)
def test_between_other_shapes_a_smoothed_difference_drops_what_a_backward_pass_by_hand_does(
    function, smooth, shape
) -> None:
    model, x = nn.Sequential(Module(function), small_net(10, shape)).eval(), images(24, SHAPE)
    by_hand = nn.Sequential(Module(lambda x: smooth(x) + (function(x) - smooth(x)).detach()), model[1]).eval()
    y, options = model(x).argmax(dim=1), {**OPTIONS, "threat": ThreatModel("Linf", 0.15), "budget": QUICK}
    found, expected = (autoattack(one, x, y, **options) for one in (model, by_hand))
    *_, blind, (name, left, _) = found.table()
    assert name == "bpda (0)"
    assert len(x) - left >= 0.9 * (len(x) - int(expected.robust.sum())) > 8
    assert blind[1] - left >= 5, "the plain attack was blind"
    assert torch.equal(found.robust, model(found.x_adv).argmax(dim=1) == y)


def test_a_smoothed_difference_follows_a_slope_and_depends_on_the_point_alone() -> None:
    weights = torch.linspace(-1, 2, 6).view(6, 1)
    model = nn.Sequential(Module(lambda x: (512 * (x @ weights)).round() / 512), nn.Linear(1, 3)).eval()
    cuts, x = found_cuts(model, torch.rand(2, 6)), torch.rand(40, 6)

    def slope(x: Tensor) -> Tensor:
        with identity_backward(model, cuts):
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)[0]

    assert torch.equal(slope(x), slope(x.flip(0)).flip(0))
    assert torch.equal(slope(x)[3:4], slope(x[3:4]))
    expected = weights.T * model[1].weight[0].detach()
    assert float(F.cosine_similarity(slope(x).mean(dim=0), expected, dim=1)) > 0.98


def test_code_between_other_shapes_is_named_and_not_replaced() -> None:
    class Halved(InForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.net((x[:, :, ::2, ::2] > 0.5).float().repeat(1, 1, 1, 4))

    model = Halved(rounded)
    model.net = small_net(10, (3, 4, 16))
    (cut,) = found_cuts(model, images(2, SHAPE))
    assert cut == Cut("", obstacle="its input is 3 x 8 x 8 and its output 10, by code that is no module")
    y = model(images(2, SHAPE)).argmax(dim=1)
    found = autoattack(model, images(2, SHAPE), y, budget=QUICK, **OPTIONS)
    assert list(found.survived) == ["apgd-ce", "apgd-t"]

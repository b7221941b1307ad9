"""The attacks check their inputs before they begin, and leave the caller's tensors unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist import LogitTransform, MixedClassifier
from mixednuts_dist.attacks.adaptive import autoattack, minimum_margin_attack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError, ThreatModelError
from tests.helpers.small_nets import images, small_net

SHAPE = (3, 8, 8)
X, Y = images(6, SHAPE), torch.arange(6)
THREAT = ThreatModel("Linf", 0.03)
BUDGET = AttackBudget(2, 1, 2, 0)


def by_minimum_margin(model: Any, x: Any, y: Any, **changed: Any) -> Any:
    changed.pop("attacks", None)
    options = {"threat": THREAT, "n_iter": 2, "n_target_classes": 1, "border_restarts": 0, **changed}
    return minimum_margin_attack(model, x, y, **options)


def by_autoattack(model: Any, x: Any, y: Any, **changed: Any) -> Any:
    return autoattack(model, x, y, **{"threat": THREAT, "budget": BUDGET, "attacks": ["apgd-ce"], **changed})


def by_adaptive(model: Any, x: Any, y: Any, **changed: Any) -> Any:
    mixed = MixedClassifier(small_net(10, SHAPE, seed=1), model, LogitTransform(1.0, 1.0, 0.0), 0.6)
    return by_autoattack(mixed, x, y, **changed)


every = pytest.mark.parametrize("attack", [by_minimum_margin, by_adaptive])
Attacker = Callable[..., Any]


class Wrapped(nn.Module):
    """A small network with something on its way."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.change = small_net(10, SHAPE), change

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.change(x))


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.Dropout(0.5)])
def test_a_model_in_training_mode_is_refused_and_not_changed(layer: nn.Module) -> None:
    model = nn.Sequential(layer, small_net(10, SHAPE))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidInputError, match=r"in training mode, where '.*0' .* call model.eval\(\) first"):
        by_autoattack(model, X, Y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    by_autoattack(model.eval(), X, Y)


def test_training_mode_without_batch_norm_warns() -> None:
    model = small_net(10, SHAPE).train()
    with pytest.warns(UserWarning, match="in training mode"):
        by_autoattack(model, X, Y)
    assert model.training
    by_autoattack(nn.Sequential(nn.Identity(), model.eval()), X, Y)  # the wrapper itself is in training mode


@pytest.mark.parametrize("change", [lambda x: (x * 255).round() / 255, torch.Tensor.detach], ids=["rounds", "detaches"])
def test_gradient_attacks_warn_of_a_model_without_gradients(change: Callable[[Tensor], Tensor]) -> None:
    model = Wrapped(change).eval()
    with pytest.warns(UserWarning, match="is zero in every pixel"):
        by_autoattack(model, X, Y)
    by_autoattack(model, X, Y, attacks=["square"])


@every
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 0.5 * torch.rand_like(x), "differ by .*: the model is random, .* over its draws with eot=20"),
        (lambda x: x.sub_(0.5), "changes the images that it is given"),
        (lambda x: x * float("nan"), "returns NaN or infinity on clean images"),
    ],
    ids=["random", "in place", "NaN"],
)
def test_unsuitable_model_is_rejected(attack: Attacker, change: Callable[[Tensor], Tensor], message: str) -> None:
    kept = X.clone()
    with pytest.raises(InvalidInputError, match=message):
        attack(Wrapped(change).eval(), X, Y)
    assert torch.equal(X, kept)


@every
def test_labels_may_be_int32_and_images_may_have_a_gradient(attack: Attacker) -> None:
    model = small_net(10, SHAPE)
    leaf = X.clone().requires_grad_()
    found, other = attack(model, leaf, Y.int()), attack(model, X, Y)
    assert torch.equal(found.x_adv, other.x_adv)
    assert torch.equal(leaf, X)
    assert not found.x_adv.requires_grad
    assert leaf.grad is None


WRONG = [
    ({"x": X.numpy()}, r"the images are ndarray; give a torch tensor"),
    ({"y": [0] * 6}, "the labels are list; give a torch tensor"),
    ({"y": torch.rand(6)}, "labels are torch.float32; give the classes' numbers"),
    ({"y": torch.arange(6) + 7}, "labels range from 7 to 12, the model's classes from 0 to 9"),
    ({"y": torch.arange(6) - 1}, "labels range from -1 to 4"),
    ({"x": X + float("nan")}, "images range over"),
    ({"sample_ids": [0, 1]}, r"there are 2 sample_ids for 6 images. Pass one per image"),
    ({"threat": ("Linf", 0.03)}, r"threat=\('Linf', 0.03\) is tuple; give ThreatModel"),
    ({"x": X.permute(0, 2, 3, 1)}, r"fails on images of shape \(2, 8, 8, 3\): RuntimeError"),
]
WRONG_OF_AUTOATTACK = [
    ({"attacks": "apgd-ce"}, r"attacks='apgd-ce' is one string; give a list .*: \['apgd-ce'\]"),
    ({"eot": 0}, r"eot=0 must be a number of draws, at least 1"),
    ({"eot": 2.5}, r"eot=2.5 must be"),
    ({"cached_BCHW": 1 - X}, r"cached_BCHW: 6 of 6 adversarial examples are outside Linf"),
    ({"cached_BCHW": X[:, :1]}, r"cached_BCHW has the shape \(6, 1, 8, 8\) and the images \(6, 3, 8, 8\)"),
    ({"budget": {"n_iter": 5}}, r"budget={'n_iter': 5} is not an AttackBudget. Pass AttackBudget\(\*\*"),
    ({"budget": 5}, r"budget=5 is not an AttackBudget. Pass AttackBudget\(n_iter"),
    ({"batch_size": 2.5}, r"batch_size=2.5 must be an integer"),
    ({"batch_size": "auto"}, r"batch_size='auto' must be an integer"),
]


@pytest.mark.parametrize(
    ("attack", "changed", "message"),
    [
        *((by_minimum_margin, *case) for case in WRONG),
        *((by_adaptive, *case) for case in WRONG + WRONG_OF_AUTOATTACK),
        (by_autoattack, {"attacks": ["apgd-t", "joint"]}, r"'joint' attacks only a MixedClassifier. Leave it out"),
    ],
)
def test_wrong_arguments_are_one_line(attack: Attacker, changed: dict[str, Any], message: str) -> None:
    given = {"x": X, "y": Y, **changed}
    with pytest.raises(InvalidInputError, match=message) as caught:
        attack(small_net(10, SHAPE), **given)
    assert "\n" not in str(caught.value).partition(": RuntimeError")[0]


def test_attacks_may_come_from_an_iterator() -> None:
    names = ["square", "apgd-ce"]
    assert list(by_autoattack(small_net(10, SHAPE), X, Y, attacks=iter(names)).survived) == names


def test_probabilities_in_place_of_logits_are_warned_of() -> None:
    model = nn.Sequential(small_net(10, SHAPE), nn.Softmax(dim=1)).eval()
    with pytest.warns(UserWarning, match=r"sum to 1 on every image: .*return the logits before the softmax"):
        by_autoattack(model, X, Y)
    by_autoattack(nn.Sequential(small_net(10, SHAPE), nn.LogSoftmax(dim=1)).eval(), X, Y)


def test_inference_mode_leaves_no_gradient_and_is_refused() -> None:
    model = small_net(10, SHAPE)
    with torch.inference_mode(), pytest.raises(InvalidInputError, match=r"inference_mode\(\) takes .* gradients away"):
        by_autoattack(model, X, Y)
    with torch.no_grad():
        found = by_autoattack(model, X, Y)
    assert torch.equal(found.x_adv, by_autoattack(model, X, Y).x_adv)


def test_a_radius_as_text_is_refused() -> None:
    with pytest.raises(ThreatModelError, match="eps='8/255' is text; give a number: eps=8/255"):
        ThreatModel("Linf", "8/255")  # type: ignore[arg-type]

"""The mixed classifier: its limits, finiteness, surrogates, and RobustBench's own mixing."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import IdentityTransform, LogitTransform
from mixednuts_dist.selection.choice import Choice
from tests.helpers.small_nets import TRANSFORM, TinyNet, tiny_images, tiny_mixture

ARCHITECTURES = "robustbench.model_zoo.architectures"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_forward_is_the_log_of_the_mixed_probabilities(alpha: float, temperature: float) -> None:
    model, x = tiny_mixture(alpha, temperature=temperature), tiny_images()
    std, rob = model.std(x).double(), TRANSFORM(model.rob(x).double()).softmax(1)
    std = nn.functional.one_hot(std.argmax(1), 10) if temperature == 0 else (std / temperature).softmax(1)
    torch.testing.assert_close(model(x).double().exp(), (1 - alpha) * std + alpha * rob, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model(x).double().logsumexp(1), torch.zeros(16, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 1e-320, 0.5, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_gradients_are_finite(alpha: float, temperature: float, dtype: torch.dtype) -> None:
    """Saturated base logits, constant rows, published CIFAR-10 parameters."""
    transform = LogitTransform(5, 4, -1.1)
    model = MixedClassifier(nn.Identity(), nn.Identity(), transform, alpha, temperature=temperature).to(dtype)
    logits = torch.tensor([[900.0, -900, 0, 0], [0, 0, 0, 0], [1, 2, 3, -1e4], [1e-20, 0, 0, 0]], dtype=dtype)
    functions: list[Callable[[Tensor], Tensor]] = [model, model.surrogate_logits, model.bypass]
    for function in functions:
        leaf = logits.clone().requires_grad_()
        out = function(leaf)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert grad.isfinite().all()


def test_the_surrogate_is_the_papers_auxiliary_mixture() -> None:
    model, x = tiny_mixture(surrogate_alpha=0.95, rd=0.9), tiny_images()
    std, rob = model.std(x).double(), model.rob(x).double()
    expected = 0.05 * std.softmax(1) + 0.95 * 0.9 * rob.softmax(1) + 0.95 * 0.1 * TRANSFORM(rob).softmax(1)
    torch.testing.assert_close(model.surrogate_logits(x).double().exp(), expected, rtol=1e-5, atol=1e-7)


def test_bypass_has_the_surrogate_gradient_from_one_pass() -> None:
    model, x, labels = tiny_mixture(), tiny_images().requires_grad_(), torch.arange(16) % 10
    bypassed = model.as_bypass()(x)
    assert model.std.n_seen == model.rob.n_seen == 16
    assert torch.equal(bypassed, model(x))
    with torch.no_grad():
        assert torch.equal(model.as_bypass()(x), model(x))
    (found,) = torch.autograd.grad(bypassed.gather(1, labels[:, None]).sum(), x)
    (expected,) = torch.autograd.grad(model.surrogate_logits(x).gather(1, labels[:, None]).sum(), x)
    assert torch.equal(found, expected)
    assert found.abs().max() > 0


def test_one_minus_alpha_is_kept_where_float64_would_lose_it() -> None:
    model = tiny_mixture(1.0, one_minus_alpha=1e-20, transform=IdentityTransform())
    std, rob = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    std[0, 2] = 1
    rob[0, 0] = 1000
    assert float(model.mix_logits(std, rob)[0, 2]) == pytest.approx(math.log(1e-20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.2}, r"alpha=1\.2 must be in \[0, 1\]"),
        ({"alpha": math.nan}, "alpha=nan must be in"),
        ({"alpha": 0.9, "one_minus_alpha": 0.2}, r"alpha=0\.9 and one_minus_alpha=0\.2 must add up to 1"),
        ({"alpha": 0.9, "temperature": -1}, r"temperature=-1 must be 0"),
        ({"alpha": 0.9, "surrogate_alpha": 95}, r"surrogate_alpha=95 must be in"),
        ({"alpha": 0.9, "rd": -0.1}, r"rd=-0\.1 must be in"),
    ],
)
def test_bad_weights_are_errors(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny_mixture(**settings)


@pytest.mark.parametrize(("dataset", "n_classes"), [("cifar10", 10), ("cifar100", 100), ("imagenet", 1000)])
@pytest.mark.filterwarnings("ignore")
def test_forward_equals_robustbenchs_mixing(dataset: str, n_classes: int) -> None:
    """RobustBench's class around the same base classifiers with the published parameters; its alpha is float32."""
    nets, maps = (import_robustbench(f"{ARCHITECTURES}.{name}") for name in ("mixing_net", "output_maps"))
    parameters = Choice.published(dataset)
    ours = MixedClassifier.from_mixture(TinyNet(n_classes, 1), TinyNet(n_classes, 2), parameters.mixture())
    scale, power, bias = parameters.at
    settings = {
        "std_map": maps.HardMaxMap(),
        "rob_map": maps.LNClampPowerScaleMap(scale=scale, power=power, clamp_bias=bias, ln_k=250),
        "alpha": parameters.alpha,
        "alpha_diffable": parameters.surrogate_alpha,
    }
    theirs = nets.NonLinMixedClassifier(ours.std, ours.rob, settings)
    with torch.no_grad():
        expected, expected_surrogate, _ = theirs(tiny_images(), return_probs=True, return_all=True)
        found = ours(tiny_images())
    torch.testing.assert_close(found.exp(), expected, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(ours.surrogate_logits(tiny_images()).exp(), expected_surrogate, rtol=2e-5, atol=1e-7)
    assert torch.equal(found.argmax(1), expected.argmax(1))

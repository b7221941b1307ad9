"""Fast gradients: the copies agree with their originals, and no result comes from a copy."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.acceleration import precision as precision_module
from mixednuts_dist.acceleration.gradient_copy import agrees, folded
from mixednuts_dist.acceleration.precision import FastCopies
from mixednuts_dist.attacks.adaptive import minimum_margin_attack
from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LayerNormTransform, LogitTransform, layer_norm_logits
from tests.helpers.small_nets import images, small_net

SHAPE = (3, 8, 8)
THREAT = ThreatModel("Linf", 0.03)


class Normalized(nn.Module):
    """Convolutions with batch normalization, and what a tracer meets in the wild."""

    def __init__(self, *, branching: bool = False) -> None:
        super().__init__()
        self.branching = branching
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            )  # fmt: skip
            self.head = nn.Linear(8 * 64, 10)
            for layer in self.body:
                if isinstance(layer, nn.BatchNorm2d):
                    layer.running_mean.uniform_(-0.5, 0.5)
                    layer.running_var.uniform_(0.2, 2)
                    nn.init.uniform_(layer.weight, 0.5, 2)
                    nn.init.uniform_(layer.bias, -0.5, 0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.branching and float(x.detach().sum()) > 1e9:  # a tracer cannot follow values
            return self.head(self.body(-x))
        return self.head(self.body((x - 0.5) / 0.25))


def n_batch_norms(network: nn.Module) -> int:
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())


@pytest.mark.parametrize("make", [Normalized, partial(Normalized, branching=True), partial(small_net, 10, SHAPE)])
def test_copies_keep_the_logits_and_leave_the_original_alone(make: Callable[[], nn.Module]) -> None:
    """Batch normalization is folded, and convolutions are in channels-last format."""
    network, x = make(), images(6, SHAPE)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    n_before, copied = n_batch_norms(network), folded(network, x)
    assert (n_batch_norms(copied), n_batch_norms(network)) == (0, n_before)
    assert torch.allclose(copied(x), network(x), atol=1e-4)
    assert not any(weight.requires_grad for weight in copied.parameters())
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    kernels = [weight for weight in copied.parameters() if weight.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)
    assert all(weight.is_contiguous() for weight in network.parameters())


def test_what_cannot_be_folded_stays_as_it_is() -> None:
    class Swapped(Normalized):
        """Batch normalization that another module reads: folding it would change the logits."""

        def forward(self, x: Tensor) -> Tensor:
            scale = self.body[1].weight.mean() * len(list(self.body[1].buffers()))
            return super().forward(x) * scale

    network, x = Swapped(), images(6, SHAPE)
    copied = folded(network, x)
    assert torch.allclose(copied(x), network(x), rtol=1e-4, atol=1e-4)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 10))
    assert folded(dense, x) is dense, "nothing to gain"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fast_gradients_are_as_strong_as_exact_ones(precision) -> None:
    """On real images and a robust classifier: the same broken images, no larger margins."""
    x, y = open_dataset("digits").read(0, 32)
    rob = nn.Sequential(load_classifier("demo:rob", "rob"), LayerNormTransform())
    options = {"threat": ThreatModel("Linf", 0.15), "n_iter": 20, "n_target_classes": 2}
    exact = minimum_margin_attack(rob.forward, x, y, **options)  # a function has no copies
    fast = minimum_margin_attack(rob, x, y, precision=FastCopies(precision), **options)
    assert int(fast.broken.sum()) >= int(exact.broken.sum())
    assert float(fast.margin.mean()) <= float(exact.margin.mean()) + 1e-3
    if precision == "fp32":  # nothing to fold, only another memory format
        assert torch.equal(fast.broken, exact.broken)
        assert torch.allclose(fast.margin, exact.margin, atol=1e-4)


def test_only_the_networks_of_a_mixture_are_copied() -> None:
    rob, x, copies = Normalized(), images(16, SHAPE), FastCopies("bf16")
    mixed = MixedClassifier(small_net(10, SHAPE, seed=1, sharpness=8), rob, LogitTransform(2.0, 2.0, -0.5), 0.6)
    copied = copies.of_model(mixed, x)
    assert copied.fast.transform is mixed.transform
    assert mixed.rob is rob
    with torch.no_grad():
        logits = copied.fast(x)
        assert logits.dtype == torch.float32
        assert float((logits.exp() - mixed(x).exp()).abs().mean()) < 0.05
    assert copies.of_network(rob, x).fast is copied.fast.rob, "a network is copied once"


def test_tf32_without_tensor_cores_warns_and_is_float32(caplog: pytest.LogCaptureFixture) -> None:
    network, x = Normalized(), images(6, SHAPE)
    copied = FastCopies("tf32").of_network(network, x)
    assert "precision=tf32: the device cpu has none" in caplog.text
    assert copied.precision == "fp32"
    assert torch.equal(copied.fast(x), FastCopies("fp32").of_network(network, x).fast(x))


class Fine(nn.Module):
    """Logits that are the differences of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.large = small_net(10, SHAPE), nn.Linear(10, 10, bias=False)
        nn.init.eye_(self.large.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.net(x) + 1e4) - 1e4


class Rough(nn.Module):
    """A network and small fast waves on it: its logits agree, but an attack along such gradients would go nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.waves, self.heights = small_net(64, SHAPE), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.net(x)
        return features[:, :10] + 1e-3 * self.heights(torch.sin(1e5 * self.waves(features)))


@pytest.mark.parametrize("kind", [Fine, Rough])
def test_network_that_bfloat16_breaks_stays_in_float32(kind: type[nn.Module], caplog) -> None:
    torch.manual_seed(0)
    assert FastCopies("bf16").of_network(kind().eval(), images(8, SHAPE)).precision == "fp32"
    assert f"{kind.__name__} does not work in bfloat16" in caplog.text


@pytest.mark.parametrize("branching", [False, True])
def test_the_layer_that_sees_the_images_stays_in_float32(branching: bool) -> None:
    """Near 1, bfloat16 has steps of 1/255 and would round such a perturbation away."""
    network, x = Normalized(branching=branching), images(8, SHAPE)
    made, seen = FastCopies("bf16").of_network(network, x).fast, []

    def note(layer: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        seen.append((given[0].dtype, layer.weight.dtype, out.dtype))

    for layer in made.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(note)
    made(x)
    assert seen == [(dtype,) * 3 for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)]


def test_the_last_steps_are_climbed_on_a_folded_float32_copy() -> None:
    """The folded copy is faster, but the original decides every result."""
    network, x = Normalized(), images(8, SHAPE)
    copies = FastCopies("bf16")
    float32 = copies.of_network(network, x).float32
    assert n_batch_norms(float32) == 0
    assert {weight.dtype for weight in float32.parameters()} == {torch.float32}
    assert agrees(float32, network, x, 1e-5)
    attacked = AttackedModel.of(network, copies=copies, like_BCHW=x)
    assert attacked.float32 is not None
    assert attacked.model is network


def test_auto_takes_float32_without_bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, timed = small_net(10, SHAPE), images(8, SHAPE), []
    monkeypatch.setattr(precision_module, "_has_bfloat16_units", lambda: False)
    monkeypatch.setattr(precision_module, "_seconds", lambda *given: timed.append(given) or 1.0)
    copied = FastCopies("auto").of_network(network, x)
    assert (copied.fast, copied.precision, timed) == (copied.float32, "fp32", [])
    # The copy is the one that precision="fp32" makes, so no timing decides an image's bits.
    assert torch.equal(copied.fast(x), FastCopies("fp32").of_network(network, x).fast(x))


@pytest.mark.parametrize(("bf16_seconds", "chosen"), [(0.8, "bf16"), (0.95, "fp32")])
def test_auto_takes_bfloat16_if_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, bf16_seconds, chosen) -> None:
    network, x = small_net(10, SHAPE), images(8, SHAPE)
    monkeypatch.setattr(precision_module, "_has_bfloat16_units", lambda: True)
    monkeypatch.setattr(precision_module, "_seconds", lambda *given: {"fp32": 1.0, "bf16": bf16_seconds}[given[2]])
    assert FastCopies("auto").of_network(network, x).precision == chosen
    monkeypatch.setattr(precision_module, "_seconds", lambda *_: pytest.fail("timed again"))
    assert FastCopies("auto").of_network(network, x).precision == chosen, "timed once: two equal calls are alike"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the restriction is of x86 CPUs")
def test_a_restricted_cpu_is_found_out_by_one_layer() -> None:
    """Its flags still name the units that oneDNN may not use."""
    code = "from mixednuts_dist.acceleration.precision import _has_bfloat16_units as units; print(units())"
    restricted = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=restricted, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.filterwarnings("ignore")  # torch deprecates its quantization module, and autograd does not follow it
def test_auto_chooses_for_a_classifier_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "_has_bfloat16_units", lambda: True)
    network, x = torch.ao.quantization.quantize_dynamic(Normalized(), {nn.Linear}, torch.qint8), images(8, SHAPE)
    assert agrees(FastCopies("auto").of_network(network, x).fast, network, x, 0.1)


def test_copies_are_compared_in_full_float32_where_tf32_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions round here as a GPU's tensor cores do where torch's switches allow it: to 10 bits of mantissa."""
    network, x = Normalized(), images(8, SHAPE)
    with torch.no_grad():
        exact, of = network(x), nn.Conv2d._conv_forward

    def rounded(values: Tensor) -> Tensor:
        return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def with_tf32(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return of(layer, rounded(x), rounded(weight), bias) if torch.backends.cudnn.allow_tf32 else of(
            layer, x, weight, bias
        )  # fmt: skip

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", with_tf32)
    with torch.no_grad():
        copied = folded(network, x)
        assert not torch.allclose(copied(x), network(x), atol=float(1e-4 * exact.abs().max())), "TF32 is on here"
    assert n_batch_norms(copied) == 0, "and yet the comparison did not notice it"


def test_what_is_no_module_or_no_precision_is_refused(victim) -> None:
    model, x, y = victim(n=4)
    with pytest.raises(InvalidInputError, match=r"'bf16' needs a torch module to copy, not function"):
        minimum_margin_attack(lambda images: layer_norm_logits(model(images)), x, y, threat=THREAT, precision="bf16")
    with pytest.raises(InvalidInputError, match=r"'fp16' is not known; valid precisions: fp32, tf32, bf16, auto"):
        FastCopies("fp16")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's imports warn
def test_compiled_copies_find_the_same() -> None:
    network, x = Normalized(), images(40, SHAPE)
    y = network(x).argmax(dim=1)
    options = {"threat": THREAT, "n_iter": 15, "n_target_classes": 2, "batch_size": 16}
    plain = minimum_margin_attack(network, x, y, precision="auto", **options)
    compiled = minimum_margin_attack(network, x, y, precision=FastCopies(compile=True), **options)
    assert torch.equal(compiled.broken, plain.broken)
    assert torch.allclose(compiled.margin, plain.margin, atol=1e-2)
    assert abs(float(compiled.margin.mean() - plain.margin.mean())) < 1e-3


def test_decided_precision_ends_with_its_network() -> None:
    """A freed network's address is given to the next one."""
    copies = FastCopies("fp32")
    for _ in range(20):
        copies.decide(nn.Linear(4, 3), "bf16")
    others = [nn.Linear(4, 3) for _ in range(20)]
    assert {copies.of_network(each, torch.rand(8, 4)).precision for each in others} == {"fp32"}

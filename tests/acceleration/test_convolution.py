"""Convolutions that compute what follows them: autograd's values and gradients, whatever the CPU has for them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixednuts_dist.acceleration import convolution
from mixednuts_dist.acceleration.convolution import Convolution, has_post_ops, is_plain
from mixednuts_dist.acceleration.fusion import Chain, fused
from mixednuts_dist.acceleration.gradient_copy import Bfloat16Copy, frozen_copy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    found, expected = found.detach().float(), expected.detach()
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.fixture(params=["as the CPU has it", "in steps"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in steps":
        monkeypatch.setattr(convolution, "has_post_ops", lambda _: False)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "side"),
    [(3, 3, 2, 1, 9), (3, 7, 2, 3, 12), (3, 1, 2, 1, 4), (3, 4, 3, 0, 9), (4, 3, 1, 1, 6), (4, 3, 1, 0, 6),
     (4, 1, 1, 0, 5), (4, 1, 1, 1, 5), (8, 2, 2, 0, 7), (40, 3, 2, 1, 8)],
)  # fmt: skip
@pytest.mark.parametrize("after", ["nothing", "relu", "sum", "sum and relu"])
def test_a_convolution_and_what_follows_it_are_those_of_autograd(
    channels: int, kernel: int, stride: int, padding: int, side: int, after: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = frozen_copy(nn.Conv2d(channels, 5, kernel, stride, padding).to(dtype))
    x = torch.rand(4, channels, side, side + 1).to(dtype).requires_grad_()
    other = torch.randn_like(layer(x)).detach().requires_grad_() if "sum" in after else None
    weights = torch.randn_like(layer(x)).detach()

    exact = frozen_copy(layer).float()(x.float()) + (0 if other is None else other.float())
    exact = exact.relu() if "relu" in after else exact
    found = Convolution(layer, dtype)(x, other, relu="relu" in after)
    with torch.no_grad():
        assert torch.equal(Convolution(layer, dtype)(x, other, relu="relu" in after), found)
    assert found.dtype == dtype
    assert close(found, exact, TOLERANCE[dtype])

    # Where rounding decides on which side of ReLU's corner a sum lies, both sides are right.
    weights = torch.where((found > 0) == (exact > 0), weights, 0)
    inputs = [x] if other is None else [x, other]
    expected = torch.autograd.grad((exact * weights).sum(), inputs)
    for grad, true in zip(torch.autograd.grad((found * weights).sum(), inputs), expected, strict=True):
        assert close(grad, true.float(), TOLERANCE[dtype])


class Residual(nn.Module):
    """Sums and ReLUs as networks write them, some of which must not be taken in."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.stem = nn.Conv2d(3, 8, 3, 2, 1)
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
            self.shared = nn.Conv2d(8, 8, 1)
            self.proj = nn.Conv2d(8, 12, 1, 2)
            self.last = nn.Conv2d(8, 12, 3, 2, 1)
            self.relu = nn.ReLU(inplace=True)
            self.scale = nn.Parameter(torch.rand(1, 8, 1, 1))
            self.fc = nn.Linear(12, 5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem((x - 0.5) / 0.25))
        x = F.relu(self.convs[1](F.relu(self.convs[0](x))) + x)
        both = self.convs[2](x)
        x = torch.relu(both) + both  # two users
        kept = changed = x * 1
        changed.add_(self.convs[3](x))  # changes what is used again below
        x = self.relu(self.convs[4](changed) + self.scale) + kept  # a sum with another shape
        x = self.shared(self.shared(x).relu()) + 1.0
        out = self.convs[5](x)
        out += x
        out = self.relu(out)
        return self.fc(self.relu(self.last(out) + self.proj(out)).mean((2, 3)))


@pytest.mark.usefixtures("_either_way")
def test_a_residual_network_keeps_its_logits_and_gradients() -> None:
    network, x = Residual(), torch.rand(6, 3, 16, 16)
    copied = fused(frozen_copy(network), torch.float32)
    assert not any(isinstance(layer, nn.Conv2d) for layer in copied.modules())
    found, expected = gradient(copied, x), gradient(network, x)
    assert close(found[0], expected[0], 1e-5)
    assert close(found[1], expected[1], 1e-5)
    assert found[1].stride() == x.stride(), "the engine's arrays have this layout"
    with torch.no_grad():  # where sums are written into what nobody reads again
        assert torch.equal(copied(x), found[0])
    rounded = gradient(Bfloat16Copy(frozen_copy(network), x), x)
    assert close(rounded[0], expected[0], 0.05)
    cosines = F.cosine_similarity(rounded[1].flatten(1), expected[1].flatten(1))
    assert float(cosines.min()) > 0.95


def gradient(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    logits = network(x)
    (grad,) = torch.autograd.grad(logits.logsumexp(dim=1).sum() - logits[:, 0].sum(), x)
    return logits.detach(), grad


def test_sums_and_relus_are_taken_in_where_nothing_else_uses_what_is_before_them() -> None:
    copied = fused(frozen_copy(Residual()), torch.float32)
    in_chains = [step.relu for chain in copied.modules() if isinstance(chain, Chain) for step in chain.steps]
    assert copied.code.count("relu = True") + sum(in_chains) == 7
    assert copied.code.count("torch.relu(") == 1
    assert len(in_chains) > 2


def test_a_sum_overwrites_only_what_convolutions_alone_have_read() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            conv = self.convs
            x = conv[0](x) + x  # what the caller holds
            first = conv[1](x)
            second = conv[2](first) + first  # read once more below
            third = conv[3](second) + first
            last = conv[4](third)
            view = last.permute(0, 2, 3, 1)  # sees what is written into `last`
            return (conv[5](third) + last + conv[6](third * 2)).permute(0, 2, 3, 1) + view

    network = frozen_copy(Sums())
    copied = fused(frozen_copy(network), torch.float32)
    chains = [chain for chain in copied.modules() if isinstance(chain, Chain)]
    assert [[step.spare for step in chain.steps] for chain in chains] == [[False, False, False, True, False]]
    x = torch.rand(2, 3, 4, 4)
    with torch.no_grad():
        kept, found = x.clone(), copied(x)
    assert torch.equal(x, kept)
    logits, grad = gradient(copied, x)
    assert torch.equal(found, logits)
    assert close(grad, gradient(network, x)[1], 1e-5)


def test_only_plain_layers_are_replaced() -> None:
    rare = (
        {"stride": (2, 1)}, {"dilation": 2}, {"padding_mode": "reflect"}, {"groups": 3}, {"padding": "same"},
        {"padding": (0, 1)},
    )  # fmt: skip
    assert not any(is_plain(nn.Conv2d(3, 6, 3, **options)) for options in rare)
    assert not is_plain(nn.Conv1d(3, 6, 3))
    assert not is_plain(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)))
    assert is_plain(nn.Conv2d(3, 6, 3, 2, padding=1))


def test_a_torch_without_these_operations_computes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Tensor:
        raise RuntimeError("no such operation")

    has_post_ops.cache_clear()
    monkeypatch.setattr(convolution._Product, "with_post_ops", gone)
    assert not has_post_ops(torch.float32)
    monkeypatch.undo()
    has_post_ops.cache_clear()

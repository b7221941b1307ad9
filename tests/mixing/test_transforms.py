"""The logit maps: LayerNorm's laws, the clamps against 50 digits, finite gradients, dtypes, errors."""

import math

import pytest
import torch
from torch import Tensor

from mixednuts_dist.config.register import CLAMPS as REGISTER
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.clamps import Clamp, clamp_logits
from mixednuts_dist.mixing.transforms import (
    IdentityTransform,
    LayerNormTransform,
    LogitTransform,
    layer_norm_logits,
)
from tests.helpers import reference

CLAMPS = REGISTER.names()


def logits(n: int = 6, n_classes: int = 10, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, n_classes, generator=torch.Generator().manual_seed(3), dtype=dtype) * 3


@pytest.mark.parametrize("ln_k", [None, 2, 7, 10])
def test_layer_norm_is_blind_to_shift_and_scale(ln_k: int | None) -> None:
    normed = layer_norm_logits(logits(), ln_k)
    torch.testing.assert_close(layer_norm_logits(4 * logits() - 30, ln_k), normed, rtol=1e-6, atol=1e-7)
    top = normed.topk(ln_k or 10, dim=1).values
    torch.testing.assert_close(top.mean(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(top.var(1), torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n_classes", [2, 250, 251, 400])
def test_layer_norm_uses_the_top_250_by_default(n_classes: int) -> None:
    wide = logits(3, n_classes)
    assert torch.equal(layer_norm_logits(wide), layer_norm_logits(wide, min(250, n_classes)))
    expected = [[float(value) for value in reference.layer_norm(row)] for row in wide.tolist()]
    torch.testing.assert_close(
        layer_norm_logits(wide), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-14
    )


def test_equal_logits_become_zeros() -> None:
    assert layer_norm_logits(torch.full((2, 5), 7.0)).abs().max() == 0


@pytest.mark.parametrize("clamp", ["gelu", "softplus"])
def test_clamps_keep_relative_precision_in_their_tails(clamp: Clamp) -> None:
    u = torch.tensor([-30.0, -8.5, -1e-9, 25.0], dtype=torch.float64)
    expected = [float(reference.clamp(reference.mpmath.mpf(value), clamp)) for value in u.tolist()]
    assert clamp_logits(u, clamp).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize(("scale", "power", "bias"), [(0.05, 0.3, -1.1), (5, 4, -1.1), (0.6, 1, 0.0), (1, 2.7, 0.9)])
def test_the_transform_equals_50_digits(clamp: Clamp, scale: float, power: float, bias: float) -> None:
    rows = logits(4, 7)
    expected = [
        [float(value) for value in reference.mapped(reference.layer_norm(row), scale, power, bias, clamp)]
        for row in rows.tolist()
    ]
    found = LogitTransform(scale, power, bias, clamp)(rows)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("power", [0.01, 0.5, 1, 1.5, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_everywhere(clamp: Clamp, power: float, dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0, 0, 0], [1, -1, 0, 0], [1e-20, 0, 0, 0], [900, -900, 3, 3]], dtype=dtype)
    for bias in (0.0, -1.1, 1.0):
        leaf = rows.clone().requires_grad_()
        mapped = LogitTransform(5.0, power, bias, clamp)(leaf)
        mapped.square().sum().backward()
        assert mapped.dtype == dtype
        assert mapped.isfinite().all()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("power", [0.7, 1, 2.5])
def test_gradients_are_right(clamp: Clamp, power: float) -> None:
    leaf = logits(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(LogitTransform(0.8, power, 0.3, clamp), (leaf,))


def test_linear_with_power_1_has_slope_at_zero() -> None:
    leaf = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    LogitTransform(1, 1, 0, "linear")(leaf)[0, 1].backward()
    assert leaf.grad is not None
    assert leaf.grad[0, 1] > 0


def test_half_precision_goes_in_and_out() -> None:
    rows = logits(dtype=torch.float32)
    mapped = LogitTransform(0.6, 2, -1)(rows.bfloat16())
    assert mapped.dtype == torch.bfloat16
    torch.testing.assert_close(mapped, LogitTransform(0.6, 2, -1)(rows.bfloat16().double()).bfloat16())


def test_the_other_maps() -> None:
    rows = logits(dtype=torch.float32)
    assert torch.equal(IdentityTransform()(rows), rows)
    assert torch.equal(LayerNormTransform(4)(rows), layer_norm_logits(rows, 4))
    torch.testing.assert_close(LogitTransform(0.5, 1, 0, "linear")(rows), LayerNormTransform()(rows) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 0), "scale=0 must be positive and finite"),
        ((1, -2, 0), "power=-2 must be positive"),
        ((math.nan, 1, 0), "scale=nan"),
        ((1, 1, math.inf), "bias=inf must be finite"),
        ((1, 1, 0, "tanh"), "clamp 'tanh' is not known. Valid names: gelu, relu"),
        ((1, 1, 0, "gelu", 1), "ln_k=1 must be at least 2"),
    ],
)
def test_bad_settings_are_errors(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LogitTransform(*arguments)


@pytest.mark.parametrize(("ln_k", "n_classes"), [(11, 10), (1, 10), (None, 1)])
def test_layer_norm_needs_2_to_k_classes(ln_k: int | None, n_classes: int) -> None:
    with pytest.raises(InvalidInputError, match=f"K={n_classes}"):
        layer_norm_logits(torch.zeros(2, n_classes), ln_k)

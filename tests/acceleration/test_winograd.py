"""Winograd's convolutions: the values of any other convolution, in fewer products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixednuts_dist.acceleration import winograd
from mixednuts_dist.acceleration.convolution import Convolution, has_post_ops
from mixednuts_dist.acceleration.gradient_copy import frozen_copy
from mixednuts_dist.acceleration.winograd import Winograd


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("after", ["nothing", "relu", "sum", "sum and relu"])
@pytest.mark.parametrize("at_once", [1, 3, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (5, 3, 4, 12), (16, 16, 8, 4)])
def test_it_is_the_convolution(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    tolerance: float,
    at_once: int,
    after: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    C, O, H, W = shape  # noqa: E741
    monkeypatch.setattr(winograd, "_VALUES", at_once * H * W * max(C, O))
    monkeypatch.setattr(winograd, "_SQUARES", 0)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, C, H, W), torch.randn(O, C, 3, 3), torch.randn(O)
    x, weight, bias = (values.to(dtype) for values in (x, weight, bias))
    other = torch.randn(5, O, H, W).to(dtype) if "sum" in after else None
    expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    expected = expected if other is None else expected + other.double()
    expected = expected.relu() if "relu" in after else expected
    kept = None if other is None else other.clone()

    found = Winograd(weight, bias)(x.contiguous(memory_format=torch.channels_last), other, "relu" in after)

    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert error(found, expected) <= tolerance
    assert other is None or torch.equal(other, kept)


def test_layers_of_many_channels_take_it_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "has_matrix_unit", lambda: False)
    passed = []
    of = Winograd.__call__
    monkeypatch.setattr(Winograd, "__call__", lambda *given: passed.append(1) or of(*given))
    layer = frozen_copy(nn.Conv2d(512, 512, 3, padding=1))
    made = Convolution(frozen_copy(layer).to(torch.bfloat16), torch.bfloat16)
    x = torch.rand(2, 512, 4, 4).to(torch.bfloat16)
    weights = torch.randn(2, 512, 4, 4)
    grads = []
    for each in (made, layer):
        leaf = x.clone().to(torch.float32 if each is layer else torch.bfloat16).requires_grad_()
        grads += torch.autograd.grad((each(leaf) * weights).sum(), leaf)
    assert error(grads[0], grads[1].double()) < 0.02
    assert len(passed) == (2 if has_post_ops(torch.bfloat16) else 0)


def test_where_it_does_not_pay_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "has_matrix_unit", lambda: False)
    weight, x = torch.zeros(512, 512, 3, 3, dtype=torch.bfloat16), torch.zeros(1, 512, 8, 8)
    assert winograd.pays(weight, x, 1, 1)
    assert winograd.pays(weight[:128, :128], torch.zeros(1, 128, 32, 56), 1, 1)
    assert not winograd.pays(weight, x, 2, 1)
    assert not winograd.pays(weight, x, 1, 0)
    assert not winograd.pays(weight.float(), x, 1, 1)
    assert not winograd.pays(weight[:, :127], x[:, :127], 1, 1)
    assert not winograd.pays(weight[:, :, :1, :1], x, 1, 1)
    assert not winograd.pays(weight, x[..., :7], 1, 1)
    assert not winograd.pays(weight, torch.zeros(1, 512, 10, 8), 1, 1)
    monkeypatch.setattr(winograd, "has_matrix_unit", lambda: True)
    assert not winograd.pays(weight, x, 1, 1)

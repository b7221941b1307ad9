"""Margins in probability and in log space: definitions, saturation, tiny margins, 50 digits."""

import math

import pytest
import torch

from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.margins import (
    log_one_minus_lead,
    log_one_minus_signed_margin,
    log_one_minus_top2_margin,
    top2_margin,
)
from tests.helpers import reference


@pytest.mark.parametrize("sharpness", [1e-12, 1e-3, 1.0, 30.0, 400.0])
@pytest.mark.parametrize("n_classes", [2, 5, 40])
def test_log_margins_equal_50_digits(n_classes: int, sharpness: float) -> None:
    logits = torch.randn(6, n_classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * sharpness
    labels, rivals = torch.arange(6) % n_classes, (torch.arange(6) + 1) % n_classes
    margins = log_one_minus_signed_margin(logits, labels), log_one_minus_top2_margin(logits)
    leads = log_one_minus_lead(logits, labels, rivals)
    for values, label, rival, signed, top2, gap in zip(logits, labels, rivals, *margins, leads, strict=True):
        row = [reference.mpmath.mpf(value) for value in values.tolist()]
        assert signed == pytest.approx(float(reference.log_one_minus_margin(row, label)), rel=1e-14)
        assert top2 == pytest.approx(float(reference.log_one_minus_margin(row)), rel=1e-14)
        assert gap == pytest.approx(float(reference.log_one_minus_lead(row, label, rival)), rel=1e-14, abs=1e-16)


def test_a_tie_is_zero_and_a_broken_image_positive() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    gaps = log_one_minus_signed_margin(logits, torch.tensor([0, 0]))
    assert gaps[0] == 0
    assert 0 < gaps[1] < math.log(2)
    assert log_one_minus_lead(logits, torch.tensor([0, 1]), torch.tensor([0, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(4, 1), (4,), (2, 3, 4)])
def test_one_class_has_no_margin(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"at least 2 classes, got \(" + str(shape[0])):
        top2_margin(torch.zeros(shape))

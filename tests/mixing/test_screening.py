"""Screened margins give the cutoffs and counts of all margins; sums by moments are the sums term by term."""

import pytest
import torch
from torch import Tensor

from mixednuts_dist.mixing import exp_sums, screening
from mixednuts_dist.mixing.exp_sums import scaled_exp_sums, split_columns
from mixednuts_dist.mixing.selection import Selection, select_parameters, select_parameters_exact
from mixednuts_dist.mixing.transforms import Clamp

BETAS = (1, 0.99, 0.985, 0.97, 0.9, 0.5, 0)
CLAMPS: list[Clamp] = ["gelu", "relu", "elu", "softplus", "linear"]


def rows(n: int, n_classes: int, *, seed: int, lift: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator)
    logits[:, 0] += lift + torch.rand(n, generator=generator)
    return logits


def same(one: Selection, other: Selection) -> None:
    deployable = one.log_one_minus_cutoffs.isfinite()
    torch.testing.assert_close(
        one.log_one_minus_cutoffs[deployable], other.log_one_minus_cutoffs[deployable], rtol=1e-12, atol=0
    )
    assert torch.equal(one.objectives.nan_to_num(), other.objectives.nan_to_num())
    assert one.chosen == other.chosen or all(
        (a.scale, a.power, a.bias) == (b.scale, b.power, b.bias)
        for a, b in zip(one.chosen, other.chosen, strict=True)
        if a is not None and b is not None
    )


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("n_classes", [60, 300])
def test_screening_changes_nothing(clamp: Clamp, n_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"scales": (0.02, 0.3, 4.0), "powers": (0.6, 1, 3.4), "biases": (-3.5, -1.1, 0.3), "betas": BETAS}
    attacked, wrong = rows(120, n_classes, seed=1), rows(50, n_classes, seed=2, lift=0.5)
    labels, std_pred = wrong.argmax(1), wrong.roll(1, 0).argmax(1)
    labels[::4] = 0
    exact_inputs = (attacked, attacked.argmax(1), wrong, labels, std_pred)
    screened = select_parameters(attacked, wrong, **grid, clamp=clamp)
    screened_exact = select_parameters_exact(*exact_inputs, **grid, clamp=clamp)
    monkeypatch.setattr(screening, "_FEW_CLASSES", 1 << 30)
    same(screened, select_parameters(attacked, wrong, **grid, clamp=clamp))
    same(screened_exact, select_parameters_exact(*exact_inputs, **grid, clamp=clamp))


def test_screening_measures_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    plain = screening.log_one_minus_gaps
    monkeypatch.setattr(
        screening, "log_one_minus_gaps", lambda duels, slab: measured.append(len(duels)) or plain(duels, slab)
    )
    select_parameters(
        rows(500, 200, seed=1), rows(200, 200, seed=2, lift=0.5), scales=(0.1, 0.5), powers=(1.0, 2.0),
        biases=(-1.0, 0.0), betas=(0.985,),
    )  # fmt: skip
    assert len(measured) == 2
    assert all(0 < n < 140 for n in measured)


@pytest.mark.parametrize(("spread", "n_terms"), [(1e-3, range(4, 6)), (0.05, range(6, 9)), (0.8, range(10, 16))])
def test_moments_equal_terms(spread: float, n_terms: range) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(40, 2000, generator=generator, dtype=torch.float64) * spread).sort(descending=True).values
    values[:, :5] += 3
    scales = [0.01, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0]
    split = split_columns(values.amax(0), float(values.min()), scales, n_rows=40)
    assert 5 <= split.head < 2000
    assert split.n_terms in n_terms
    shifts = values[:, 0]
    found = scaled_exp_sums(values, shifts, scales, split)
    expected = torch.stack([(scale * (values - shifts[:, None])).exp().sum(1) for scale in scales])
    torch.testing.assert_close(found, expected, rtol=4e-15, atol=0)


def test_few_terms_are_summed_one_by_one() -> None:
    assert split_columns(torch.zeros(50, dtype=torch.float64), 0.0, [1.0], n_rows=2) == exp_sums.Split(50)

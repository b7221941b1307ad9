"""Screened margins give the cutoffs and counts of all margins."""

import pytest
import torch
from torch import Tensor

from mixednuts_dist.mixing.clamps import Clamp
from mixednuts_dist.selection import screening
from mixednuts_dist.selection.kernel import GapRows, RelativeLogits, Slab
from mixednuts_dist.selection.selection import Selection, select_parameters, select_parameters_exact

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
@pytest.mark.parametrize("n_classes", [5, 60, 300])
def test_screening_changes_nothing(clamp: Clamp, n_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"scales": (0.02, 0.3, 4.0), "powers": (0.6, 1, 3.4), "biases": (-3.5, -1.1, 0.3), "betas": BETAS}
    attacked, wrong = rows(120, n_classes, seed=1), rows(50, n_classes, seed=2, lift=0.5)
    labels, std_pred = wrong.argmax(1), wrong.roll(1, 0).argmax(1)
    labels[::4] = 0
    exact_inputs = (attacked, attacked.argmax(1), wrong, labels, std_pred)
    screened = select_parameters(attacked, wrong, **grid, clamp=clamp)
    screened_exact = select_parameters_exact(*exact_inputs, **grid, clamp=clamp)
    monkeypatch.setattr(screening, "_FEW_BETAS", 0)
    same(screened, select_parameters(attacked, wrong, **grid, clamp=clamp))
    same(screened_exact, select_parameters_exact(*exact_inputs, **grid, clamp=clamp))


def test_screening_measures_few_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    plain = screening.log_one_minus_gaps

    def counted(gap_rows: GapRows, slab: Slab, relative: RelativeLogits, entries: Tensor) -> Tensor:
        measured.append(len(entries) / (len(gap_rows) * len(slab.powers) * len(slab.scales)))
        return plain(gap_rows, slab, relative, entries)

    monkeypatch.setattr(screening, "log_one_minus_gaps", counted)
    select_parameters(
        rows(500, 200, seed=1), rows(200, 200, seed=2, lift=0.5), scales=(0.1, 0.5), powers=(1.0, 2.0),
        biases=(-1.0, 0.0), betas=(0.985,),
    )  # fmt: skip
    assert len(measured) == 2
    assert all(0 < share < 0.03 for share in measured)

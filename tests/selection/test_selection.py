"""Algorithm 1 against 50-digit arithmetic, golden values, and its rules for ties, exclusions and bad input."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mixednuts_dist.config.keys import SearchConfig, grid_values
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.grid import Grid, kept_images
from mixednuts_dist.selection.selection import (
    Selection,
    search_grid,
    select_parameters,
    select_parameters_exact,
    surrogate_alpha,
)
from tests.helpers import reference
from tests.helpers.random_logits import random_rows, with_points
from tests.helpers.reference import Answer

BETAS = (1, 0.99, 0.985, 0.97, 0.9, 0.5, 0)
GRID = {"scales": (0.05, 0.6, 5.0), "powers": (0.7, 1.0, 3.3), "biases": (-1.29, 0.0, 0.8), "betas": BETAS}
SMALL_GRID = {"scales": (0.002, 0.02), "powers": (1.0, 2.7), "biases": (-0.6, 0.1), "betas": BETAS}
# FLAT presses logits to nearly equal values.
FLAT = {"scales": (1e-3,), "powers": (4.0, 9.0), "biases": (-2.5, -2.0), "betas": BETAS}
STEEP = {"scales": (0.6, 4.0), "powers": (1.0, 2.0), "biases": (-1.29, 0.4), "betas": BETAS}


def rows(n: int, n_classes: int, *, seed: int, lift: float = 2.0) -> Tensor:
    """Noise with one class lifted; every seventh row is saturated."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator)
    logits[torch.arange(n), torch.randint(0, n_classes, (n,), generator=generator)] += lift
    logits[::7] *= 40
    return logits


def assert_same(selection: Selection, answers: list[list[Answer]]) -> None:
    is_exact = selection.criterion.maximized
    for i, beta in enumerate(selection.grid.betas):
        found = selection.log_one_minus_cutoffs[i].flatten().tolist()
        for value, answer in zip(found, answers[i], strict=True):
            assert abs(value - answer.log_cutoff) <= min(1e-12, 1e-9 * abs(answer.log_cutoff)), beta
        found = zip(selection.objectives[i].flatten().tolist(), selection.kept[i].flatten().tolist(), strict=True)
        for (objective, kept), answer in zip(found, answers[i], strict=True):
            if answer.usable or not is_exact:
                assert objective == answer.objective
                assert kept == answer.kept
        best = reference.chosen(answers[i], selection.grid, maximized=is_exact)
        if best is None:
            with pytest.raises(InvalidInputError, match="none of"):
                selection.for_beta(beta)
        else:
            chosen = selection.for_beta(beta)
            assert (chosen.scale, chosen.power, chosen.bias) == best


@pytest.mark.parametrize(
    ("n_classes", "n", "lift", "grid", "clamp"),
    [
        (2, 8, 2.0, GRID, "gelu"),
        (3, 12, 2.0, GRID, "gelu"),
        (10, 10, 2.0, GRID, "gelu"),
        (100, 9, 6.0, SMALL_GRID, "gelu"),
        (1000, 2, 6.0, SMALL_GRID, "gelu"),
        *((5, 6, 2.0, GRID, clamp) for clamp in ("relu", "elu", "softplus", "linear")),
        (10, 14, 3.0, FLAT, "gelu"),
        (10, 12, 40.0, STEEP, "gelu"),
        (100, 12, 40.0, STEEP, "gelu"),
    ],
)
def test_paper_criterion_equals_50_digits(n_classes: int, n: int, lift: float, grid: Any, clamp: str) -> None:
    attacked, wrong = rows(n, n_classes, seed=1, lift=lift), rows(n, n_classes, seed=2, lift=lift / 2)
    selection = select_parameters(attacked, wrong, **grid, clamp=clamp)
    assert_same(selection, reference.paper_answers(attacked, wrong, selection.grid))
    if grid is FLAT:  # margins that a difference of probabilities in float64 would lose
        assert selection.log_one_minus_cutoffs.abs().min() < 1e-16
    if grid is STEEP:  # margins that are 1 in float64
        assert selection.log_one_minus_cutoffs.min() < -37


@pytest.mark.parametrize(
    ("n_classes", "n", "lift", "grid"),
    [(2, 8, 2.0, GRID), (3, 12, 2.0, GRID), (10, 10, 2.0, GRID), (100, 6, 6.0, SMALL_GRID), (1000, 2, 6.0, SMALL_GRID)],
)
def test_exact_criterion_equals_50_digits(n_classes: int, n: int, lift: float, grid: Any) -> None:
    attacked, clean = rows(n, n_classes, seed=5, lift=lift), rows(n, n_classes, seed=6, lift=lift / 2)
    attacked_labels, labels, std_pred = attacked.argmax(1), clean.argmax(1), clean.roll(1, 0).argmax(1)
    attacked_labels[0] = (attacked_labels[0] + 1) % n_classes
    labels[::3] = std_pred[::3]
    inputs = (attacked, attacked_labels, clean, labels, std_pred)
    selection = select_parameters_exact(*inputs, **grid)
    assert_same(selection, reference.exact_answers(*inputs, selection.grid))


@pytest.mark.parametrize(("n_classes", "seed"), [(10, 0), (3, 3)])
def test_exact_criterion_with_more_examples_equals_50_digits(n_classes: int, seed: int) -> None:
    """The best threshold that keeps at least beta is better than the one that keeps just beta on some candidates."""
    cached = random_rows(24, n_classes, seed=seed)
    points = with_points(cached, 16)
    points = replace(points, std_pred_P=points.rob_logits_PK.argmin(dim=1))
    robust = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    inputs = (cached.rob_attacked_BK, cached.labels_B, cached.rob_clean_BK, cached.labels_B, cached.std_pred_B)
    selection = search_grid(ExactCriterion.of(*inputs, clamp="gelu", ln_k=None, points=points), Grid(**GRID))
    assert_same(selection, reference.exact_answers(*inputs, selection.grid, points))
    loses = (points.rob_logits_PK.argmax(dim=1) != cached.labels_B[points.image_P]) & robust[points.image_P]
    assert bool(loses.any()), "an example that `rob` gets wrong loses its image"
    needed = torch.tensor([kept_images(beta, selection.criterion.n_attacked) for beta in BETAS])
    assert bool((selection.kept > needed.reshape(-1, 1, 1, 1)).any())


@pytest.mark.parametrize("n_classes", [2, 10, 37])
def test_equal_rows_tie_wherever_they_stand(n_classes: int) -> None:
    """The same logits are attacked and clean: an image whose margin equals the threshold counts."""
    attacked = rows(61, n_classes, seed=9)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    selection = select_parameters(attacked, attacked[order], **GRID)
    for i, beta in enumerate(BETAS):
        kept = max(1, math.ceil(beta * 61))
        assert (selection.objectives[i] * 61 >= kept - 1e-9).all()


def test_alpha_of_six_hand_written_margins() -> None:
    """Two classes, no LayerNorm's doing: softmax margins tanh(d / 2) of six gaps d, kept shares by order statistic."""
    margins = [0.1, 0.2, 0.3, 0.5, 0.7, 0.9]
    logits = torch.tensor([[2 * math.atanh(m), 0.0] for m in margins], dtype=torch.float64)
    golden = {1.0: 0.1, 0.9: 0.1, 0.83: 0.2, 0.5: 0.5, 0.34: 0.5, 0.16: 0.9, 0.0: 0.9}
    for beta, cutoff in golden.items():
        assert surrogate_alpha(logits, beta) == pytest.approx(1 / (1 + cutoff), abs=1e-14)


@pytest.mark.parametrize(("beta", "n", "kept"), [(0.985, 714, 704), (0.985, 200, 197), (0.97, 100, 97), (0, 9, 1)])
def test_kept_images_rounds_the_decimal_beta_up(beta: float, n: int, kept: int) -> None:
    selection = select_parameters(
        rows(n, 6, seed=7), rows(5, 6, seed=8), scales=[1], powers=[2], biases=[-0.5], betas=[beta]
    )
    assert selection.for_beta(beta).kept_predicted == kept_images(beta, n) == kept


def test_ties_go_to_the_smaller_weight_of_rob() -> None:
    """No clean image is wrong: every objective is 0, and the largest 1 - alpha wins."""
    selection = select_parameters(rows(40, 10, seed=11), rows(0, 10, seed=1), **GRID)
    assert selection.objectives.abs().max() == 0
    usable = ~selection.undeployable[2]
    assert selection.for_beta(0.985).log_one_minus_cutoff == selection.log_one_minus_cutoffs[2][usable].min()
    assert any("No clean image is misclassified" in note for note in selection.notes())


def test_saturated_candidates_are_excluded_and_counted() -> None:
    attacked, wrong = rows(40, 10, seed=12, lift=9), rows(20, 10, seed=13)
    selection = select_parameters(attacked, wrong, scales=[0.1, 1e3], powers=[1, 4], biases=[0], betas=[0.5])
    saturated = selection.log_one_minus_cutoffs[0] < -24 * math.log(2)
    assert torch.equal(selection.undeployable[0], saturated)
    assert 0 < selection.n_undeployable < 4
    assert any("left out" in note for note in selection.notes())


def test_logits_that_overflow_float32_are_excluded() -> None:
    attacked, wrong = rows(40, 1000, seed=12), rows(20, 1000, seed=13)
    selection = select_parameters(attacked, wrong, scales=[1e-3], powers=[1, 60, 1000], biases=[0], betas=[0.0, 1])
    assert selection.undeployable[1, 0, :, 0].tolist() == [False, True, True]


def test_nothing_deployable_is_an_error_with_the_counts() -> None:
    with pytest.raises(InvalidInputError, match=r"none of 2 candidates can be used: 0 have .* 2 have logits"):
        select_parameters(
            rows(8, 10, seed=1, lift=90), rows(3, 10, seed=2), scales=[1e4, 1e5], powers=[3], biases=[0], betas=[0.5]
        )


def test_an_optimum_on_the_edge_is_reported() -> None:
    arguments = {"powers": (1, 2, 3), "biases": (-0.5,), "betas": (0.9,)}
    selection = select_parameters(rows(50, 10, seed=1), rows(30, 10, seed=2), scales=(0.1, 0.2), **arguments)
    chosen = selection.for_beta(0.9)
    assert "scale" in chosen.on_grid_edge
    assert "bias" not in chosen.on_grid_edge
    assert any("grid's edge in scale" in note for note in selection.notes())


def test_gelu_class_changes_make_candidates_infeasible() -> None:
    """With a bias this low even the top logit is in GELU's falling part, so that the bottom class wins."""
    attacked = rows(30, 10, seed=3)
    labels = attacked.argmax(1)
    arguments = {"scales": (1.0,), "powers": (1,), "betas": (0.9,)}
    selection = select_parameters_exact(
        attacked, labels, attacked, labels, labels.roll(1), biases=(-6.0, 0.0), **arguments
    )
    assert selection.infeasible[0, 0, 0].tolist() == [True, False]
    assert selection.for_beta(0.9).bias == 0
    with pytest.raises(InvalidInputError, match="1 have a threshold below 0"):
        select_parameters_exact(attacked, labels, attacked, labels, labels, biases=(-6.0,), **arguments)
    paper = select_parameters(attacked, attacked, biases=(-6.0,), **arguments)
    assert paper.for_beta(0.9).n_class_changes == 60
    assert any("changes the class of 60 of 60 images" in note for note in paper.notes())


def test_select_parameters_defaults_to_the_configured_grid() -> None:
    attacked, wrong, default = rows(60, 3, seed=1), rows(20, 3, seed=2), SearchConfig()
    labels = attacked.argmax(1)
    exact, paper = (
        select_parameters_exact(attacked, labels, attacked, labels, labels),
        select_parameters(attacked, wrong),
    )
    for found in (exact, paper):
        for axis in ("scales", "powers", "biases"):
            assert getattr(found.grid, axis) == grid_values(getattr(default, axis))
        assert found.grid.betas == default.all_betas()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"betas": [98.5]}, r"^betas\.0: .*less than or equal to 1 \(value 98\.5\)$"),
        ({"betas": [math.nan]}, r"betas\.0: .*nan"),
        ({"betas": []}, "betas: .*at least 1 item"),
        ({"betas": ["high"]}, r"betas\.0: .*number .*\(value 'high'\)"),
        ({"scales": [1, 0]}, "scales: holds 0; every candidate must be positive"),
        ({"powers": [-1]}, "powers: holds -1"),
        ({"biases": [math.inf]}, r"biases\.0: .*inf"),
        ({"ln_k": 11}, r"ln_k=11 must be in \[2, K=10\]"),
        ({"ln_k": 1}, r"ln_k=1 must be in \[2, K=10\]: one logit has no variance"),
        ({"clamp": "tanh"}, "clamp 'tanh' is not known. Valid names: gelu, relu, elu, softplus, linear"),
    ],
)
def test_bad_settings_are_errors_with_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        select_parameters(rows(9, 10, seed=1), rows(5, 10, seed=2), **{**GRID, **change})


def test_bad_logits_are_errors_with_the_row() -> None:
    good, grid = rows(9, 10, seed=1), GRID
    bad = good.clone()
    bad[4, 2] = math.nan
    with pytest.raises(InvalidInputError, match=r"clean_wrong_BK is not finite .* in 1 of 9 rows, the first is row 4"):
        select_parameters(good, bad, **grid)
    with pytest.raises(InvalidInputError, match=r"at least 2 classes, got \(9, 1\)"):
        select_parameters(good[:, :1], good[:, :1], **grid)
    with pytest.raises(InvalidInputError, match="clean_wrong_BK has K=9 classes, the others have K=10"):
        select_parameters(good, good[:, :9], **grid)
    with pytest.raises(InvalidInputError, match="no attacked image is classified correctly"):
        select_parameters(good[:0], good, **grid)


def test_bad_labels_are_errors() -> None:
    logits, grid = rows(9, 10, seed=1), GRID
    labels = logits.argmax(1)
    with pytest.raises(InvalidInputError, match=r"attacked_labels_B spans .* the logits have K=10 classes"):
        select_parameters_exact(logits, labels + 10, logits, labels, labels, **grid)
    with pytest.raises(InvalidInputError, match=r"std_pred_B has shape \(4,\), expected \(9,\)"):
        select_parameters_exact(logits, labels, logits, labels, labels[:4], **grid)
    with pytest.raises(InvalidInputError, match="clean_BK has no image"):
        select_parameters_exact(logits, labels, logits[:0], labels[:0], labels[:0], **grid)
    with pytest.raises(InvalidInputError, match="no attacked image is classified correctly"):
        select_parameters_exact(logits, (labels + 1) % 10, logits, labels, labels, **grid)


def test_a_beta_that_was_not_searched_is_an_error() -> None:
    selection = select_parameters(rows(9, 10, seed=1), rows(5, 10, seed=2), **GRID)
    with pytest.raises(InvalidInputError, match=r"beta=0\.8 was not searched; these were: 1\.0, 0\.99"):
        selection.for_beta(0.8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("n_classes", [10, 300])
def test_a_gpu_answers_as_the_cpu_does(n_classes: int) -> None:
    attacked, clean = rows(300, n_classes, seed=1), rows(200, n_classes, seed=2)
    inputs = (attacked, attacked.argmax(1), clean, clean.argmax(1), clean.roll(1, 0).argmax(1))
    on_cpu = select_parameters_exact(*inputs, **GRID)
    on_gpu = select_parameters_exact(*(values.cuda() for values in inputs), **GRID)
    torch.testing.assert_close(on_gpu.log_one_minus_cutoffs, on_cpu.log_one_minus_cutoffs, rtol=1e-11, atol=0)
    assert torch.equal(on_gpu.objectives.nan_to_num(), on_cpu.objectives.nan_to_num())
    for beta in BETAS:
        mine, theirs = on_gpu.for_beta(beta), on_cpu.for_beta(beta)
        assert (mine.scale, mine.power, mine.bias) == (theirs.scale, theirs.power, theirs.bias)

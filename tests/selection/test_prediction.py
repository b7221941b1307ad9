"""The closed forms against the mixed classifier itself, image by image."""

import math

import pytest
import torch
from torch import nn

from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.mixture import Mixture, mixed_classes, robust_lower_bound
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.inputs import CachedLogits
from mixednuts_dist.selection.prediction import with_predictions
from tests.helpers.random_logits import GRID, exact, random_rows

TRANSFORM = LogitTransform(0.7, 2.2, -0.4)


def cached(n: int = 200) -> CachedLogits:
    return random_rows(n, seed=1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.6, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("n_classes", [2, 3, 10, 200])
def test_closed_form_equals_the_classifier(n_classes: int, alpha: float) -> None:
    rob = 2 * torch.randn(300, n_classes, generator=torch.Generator().manual_seed(3))
    std_pred = rob.flip(0).argmax(1)
    mixture = Mixture(TRANSFORM, alpha)
    expected = mixture.log_probs(nn.functional.one_hot(std_pred, n_classes), rob).argmax(1)
    assert torch.equal(mixed_classes(rob, std_pred, mixture), expected)


def test_the_robust_bound_keeps_what_beta_asks_for() -> None:
    inputs = cached()
    n_right = int((inputs.rob_attacked_BK.argmax(1) == inputs.labels_B).sum())
    selection = exact(inputs)
    for beta in selection.grid.betas:
        chosen = selection.for_beta(beta)
        bound = robust_lower_bound(inputs.rob_attacked_BK, inputs.labels_B, chosen.mixture())
        assert int(bound.sum()) >= beta * n_right
        assert int(bound.sum()) == chosen.kept_predicted


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.99])
def test_the_robust_bound_holds_for_any_std(alpha: float) -> None:
    """Up to alpha = 1/2, it holds for no image."""
    inputs, mixture = cached(), Mixture(TRANSFORM, alpha)
    bound = robust_lower_bound(inputs.rob_attacked_BK, inputs.labels_B, mixture)
    survives = torch.ones_like(bound)
    for std_class in range(10):
        std_pred = torch.full_like(inputs.labels_B, std_class)
        survives &= mixed_classes(inputs.rob_attacked_BK, std_pred, mixture) == inputs.labels_B
    assert torch.equal(bound, survives)
    assert bool(bound.any()) == (alpha > 0.5) and not bound.all()


def test_a_choice_is_given_its_predictions_with_intervals() -> None:
    inputs = cached()
    curve = [with_predictions(choice, inputs) for choice in exact(inputs).chosen if choice]
    assert tuple(point.beta for point in curve) == GRID.betas
    assert [point.kept_predicted for point in curve] == sorted((p.kept_predicted for p in curve), reverse=True)
    for point in curve:
        assert point.clean_correct == point.objective_count
        assert point.total == 200
        counts = (point.clean_correct, point.kept_predicted)
        for count, (low, high) in zip(counts, (point.clean_interval, point.kept_interval), strict=True):
            share = count / 200
            assert low <= share <= high
            assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(share * (1 - share) / 200), abs=0.012)


def test_bad_inputs_are_errors() -> None:
    inputs, mixture = cached(20), Mixture(TRANSFORM, 0.9)
    with pytest.raises(InvalidInputError, match=r"labels_B has shape \(3,\), expected \(20,\)"):
        robust_lower_bound(inputs.rob_attacked_BK, inputs.labels_B[:3], mixture)
    with pytest.raises(InvalidInputError, match="rob_logits_BK is not finite"):
        mixed_classes(inputs.rob_clean_BK * math.nan, inputs.std_pred_B, mixture)

"""What a choice will reach on the cached images: exact clean accuracy, kept images, intervals; criteria compared.

Shapes: B images, K classes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.closed_forms import mixed_clean_correct, robust_lower_bound
from .choice import Choice, Selection
from .inputs import CachedLogits


@dataclass(frozen=True)
class PredictedShare:
    """A share of images with a bootstrap interval over the images."""

    correct: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """`correct / total`."""
        return self.correct / self.total


@dataclass(frozen=True)
class TradeOffPoint:
    """What one beta's choice will reach."""

    choice: Choice  # with its predictions filled in
    clean: PredictedShare  # exact on these images
    kept: PredictedShare  # rob's robust images that stay right under the stored perturbations, of all images


def trade_off_curve(
    selection: Selection,
    cached: CachedLogits,
    *,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> list[TradeOffPoint]:
    """The predicted clean and robust accuracy of every beta that has a choice, in the order of `selection.betas`."""
    return [
        trade_off_point(choice, cached, confidence=confidence, n_resamples=n_resamples, seed=seed)
        for choice in selection.chosen
        if choice is not None
    ]


def trade_off_point(
    choice: Choice,
    cached: CachedLogits,
    *,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> TradeOffPoint:
    """The predicted clean and robust accuracy of one choice."""
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; the usual value is 0.95")
    if not len(cached.labels_B):
        raise InvalidInputError("cached has no image: there is nothing to predict from")
    bootstrap = _Bootstrap(confidence, n_resamples, seed)
    clean, kept = (bootstrap.share(outcomes_B) for outcomes_B in predicted_outcomes(choice, cached))
    filled = replace(
        choice,
        clean_correct=clean.correct,
        kept_predicted=kept.correct,
        total=clean.total,
        clean_interval=(clean.low, clean.high),
        kept_interval=(kept.low, kept.high),
    )
    return TradeOffPoint(filled, clean, kept)


def predicted_outcomes(choice: Choice, cached: CachedLogits) -> tuple[Tensor, Tensor]:
    """(right on the clean image, robust for rob and right on the attacked one whatever std says), bool (B,) each."""
    mixture = choice.mixture()
    clean_B = mixed_clean_correct(cached.rob_clean_BK, cached.labels_B, cached.std_pred_B, mixture)
    robust_B = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    return clean_B, robust_B & robust_lower_bound(cached.rob_attacked_BK, cached.labels_B, mixture)


def compare_criteria(paper: Selection, exact: Selection, cached: CachedLogits) -> tuple[str, ...]:
    """One warning for every beta at which the paper's choice makes the mixture less accurate than the exact one."""
    pairs = [(paper.choice(beta), exact.choice(beta)) for beta in exact.betas if beta in paper.betas]
    notes = [compare_candidates(theirs, ours, cached) for theirs, ours in pairs if theirs and ours]
    return tuple(note for note in notes if note)


def compare_candidates(paper: Choice, exact: Choice, cached: CachedLogits) -> str | None:
    """A warning where the mixture with `paper` is less accurate on these images than the one with `exact`."""
    n_paper, n_exact = (int(predicted_outcomes(choice, cached)[0].sum()) for choice in (paper, exact))
    if n_paper >= n_exact:
        return None
    return (
        f"beta {exact.beta}: the paper's criterion would choose scale {paper.scale:.6g}, power {paper.power:.6g}, "
        f"bias {paper.bias:.6g}, with which the mixture gets {n_paper} of {len(cached.labels_B)} clean images "
        f"right; the exact criterion's choice gets {n_exact}."
    )


@dataclass(frozen=True)
class _Bootstrap:
    confidence: float
    n_resamples: int
    seed: int

    def share(self, outcomes_B: Tensor) -> PredictedShare:
        """Percentile interval; the number of successes in n images drawn with replacement is binomial."""
        correct, total = int(outcomes_B.sum()), len(outcomes_B)
        generator = torch.Generator().manual_seed(self.seed)
        counts = torch.full((self.n_resamples,), float(total), dtype=torch.float64)
        draws = torch.binomial(counts, torch.full_like(counts, correct / total), generator=generator) / total
        tail = (1 - self.confidence) / 2
        low, high = torch.quantile(draws, draws.new_tensor([tail, 1 - tail])).tolist()
        return PredictedShare(correct, total, low, high)

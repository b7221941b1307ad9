"""What the mixed classifier will do, from cached logits: exact clean accuracy, a guaranteed robust one, the trade-off.

With temperature 0 std adds `1 - alpha` to one class k, so the mixture answers M(rob)'s top class t where
`alpha (p_t - p_k) > 1 - alpha` and k elsewhere; and an image that M(rob) gets right with a margin of at least
`(1 - alpha) / alpha` stays right whatever std says (paper, lemma behind theorem 4.3).

Shapes: B images, K classes. Logits are rob's raw ones.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_gap, log_one_minus_signed_margin
from ..mixing.transforms import LogitMap
from .candidates import class_indices, require_logits
from .selection_result import SelectedCandidate, Selection

_ROUNDING = 1e-14  # of the logits, of log(1 - cutoff) and of alpha: the image at the cutoff itself must reach it


def mixed_classes(
    rob_logits_BK: Tensor, std_pred_B: Tensor, transform: LogitMap, alpha: float, one_minus_alpha: float
) -> Tensor:
    """The classes that the T = 0 mixture predicts, shape (B,), from rob's logits and std's classes."""
    require_logits("rob_logits_BK", rob_logits_BK)
    std_pred_B = class_indices("std_pred_B", std_pred_B, rob_logits_BK)
    mapped_BK = transform(rob_logits_BK.double())
    top_B = mapped_BK.argmax(dim=1)
    rob_wins_B = log_one_minus_gap(mapped_BK, top_B, std_pred_B) < _log_one_minus_cutoff(alpha, one_minus_alpha)
    return torch.where(rob_wins_B, top_B, std_pred_B)


def mixed_clean_correct(
    rob_clean_BK: Tensor,
    labels_B: Tensor,
    std_pred_B: Tensor,
    transform: LogitMap,
    alpha: float,
    one_minus_alpha: float,
) -> Tensor:
    """Which clean images the T = 0 mixture gets right, shape (B,), bool: exact, without running it."""
    classes_B = mixed_classes(rob_clean_BK, std_pred_B, transform, alpha, one_minus_alpha)
    return classes_B == class_indices("labels_B", labels_B, rob_clean_BK)


def robust_lower_bound(
    rob_attacked_BK: Tensor, labels_B: Tensor, transform: LogitMap, alpha: float, one_minus_alpha: float
) -> Tensor:
    """Which attacked images the mixture gets right for any std, shape (B,), bool: signed margin >= cutoff."""
    require_logits("rob_attacked_BK", rob_attacked_BK)
    labels_B = class_indices("labels_B", labels_B, rob_attacked_BK)
    mapped_BK = transform(rob_attacked_BK.double())
    log_cutoff = _log_one_minus_cutoff(alpha, one_minus_alpha)
    if log_cutoff == -math.inf:
        return torch.zeros_like(labels_B, dtype=torch.bool)
    rounding_B = _ROUNDING * (mapped_BK.abs().amax(dim=1) - log_cutoff + math.expm1(-log_cutoff))
    reached_B: Tensor = log_one_minus_signed_margin(mapped_BK, labels_B) <= log_cutoff + rounding_B
    return reached_B


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
    """What one beta's candidate will reach."""

    candidate: SelectedCandidate
    clean: PredictedShare  # exact on these images
    robust: PredictedShare  # a lower bound, under the stored perturbations


@dataclass(frozen=True)
class CachedLogits:
    """Everything that predictions are made from; one row an image, clean and attacked alike."""

    rob_clean_BK: Tensor
    rob_attacked_BK: Tensor
    labels_B: Tensor
    std_pred_B: Tensor


def trade_off_curve(
    selection: Selection,
    cached: CachedLogits,
    *,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> list[TradeOffPoint]:
    """The predicted clean and robust accuracy of every beta that has a candidate, in the order of `selection.betas`."""
    candidates = [candidate for candidate in selection.chosen if candidate is not None]
    return [
        trade_off_point(candidate, cached, confidence=confidence, n_resamples=n_resamples, seed=seed)
        for candidate in candidates
    ]


def trade_off_point(
    candidate: SelectedCandidate,
    cached: CachedLogits,
    *,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> TradeOffPoint:
    """The predicted clean and robust accuracy of one candidate."""
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; the usual value is 0.95")
    if not len(cached.labels_B):
        raise InvalidInputError("cached has no image: there is nothing to predict from")
    bootstrap = _Bootstrap(confidence, n_resamples, seed)
    clean_B, robust_B = predicted_outcomes(candidate, cached)
    return TradeOffPoint(candidate, bootstrap.share(clean_B), bootstrap.share(robust_B))


def predicted_outcomes(candidate: SelectedCandidate, cached: CachedLogits) -> tuple[Tensor, Tensor]:
    """(right on the clean image, guaranteed right on the attacked one), two bool tensors of shape (B,)."""
    mixing = candidate.mixing()
    clean_B = mixed_clean_correct(cached.rob_clean_BK, cached.labels_B, cached.std_pred_B, *mixing)
    return clean_B, robust_lower_bound(cached.rob_attacked_BK, cached.labels_B, *mixing)


def compare_criteria(
    paper: Selection, exact: Selection, *, rob_clean_BK: Tensor, labels_B: Tensor, std_pred_B: Tensor
) -> tuple[str, ...]:
    """One warning for every beta at which the paper's candidate makes the mixture less accurate than the exact one."""
    notes = []
    for beta in (beta for beta in exact.betas if beta in paper.betas):
        theirs, ours = (selection.chosen[selection.betas.index(beta)] for selection in (paper, exact))
        if theirs is not None and ours is not None:
            notes.append(compare_candidates(theirs, ours, rob_clean_BK, labels_B, std_pred_B))
    return tuple(note for note in notes if note)


def compare_candidates(
    paper: SelectedCandidate, exact: SelectedCandidate, rob_clean_BK: Tensor, labels_B: Tensor, std_pred_B: Tensor
) -> str | None:
    """A warning where the mixture with `paper` is less accurate on these images than the one with `exact`."""
    n_paper, n_exact = (
        int(mixed_clean_correct(rob_clean_BK, labels_B, std_pred_B, *candidate.mixing()).sum())
        for candidate in (paper, exact)
    )
    if n_paper >= n_exact:
        return None
    return (
        f"beta {exact.beta}: the paper's criterion would choose scale {paper.scale:.6g}, power {paper.power:.6g}, "
        f"bias {paper.bias:.6g}, with which the mixture gets {n_paper} of {len(labels_B)} clean images "
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


def _log_one_minus_cutoff(alpha: float, one_minus_alpha: float) -> float:
    """`log(1 - (1 - alpha) / alpha)`; -inf up to alpha = 1/2, where no margin of rob outweighs std."""
    for name, value in (("alpha", alpha), ("one_minus_alpha", one_minus_alpha)):
        if not 0 <= value <= 1:
            raise InvalidInputError(f"{name}={value} must be in [0, 1]")
    if alpha <= one_minus_alpha:
        return -math.inf
    return math.log1p(-one_minus_alpha / alpha)

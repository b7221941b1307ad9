"""What a choice will reach: on the cached images, exactly; on others, honestly corrected; and criteria compared.

A choice that is best on the images it was searched on looks better there than it is: it was chosen for fitting them.
So each resample (images drawn with replacement, as multiplicities) is searched again, and the choice it leads to is
looked at in three places: on the resample (as the search sees it), on the images that the resample left out, and on all
images. The first minus the second is the optimism; the spread of the first minus the third is that of an estimate
around what it estimates.

The search is repeated over a pool: the candidates with the best counts, each with the cutoffs around the constraint's.
What a member of the pool gets right is one row of zeros and ones, so all members on all resamples are one product of
matrices. The pool's rows are computed candidate by candidate and never held together: at 6,144 rows of 100,000 images
they would be 5 GB.

Shapes: B and N images, n of them robust for rob, K classes, L cutoffs of a candidate, C members of the pool, R
resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.mixture import mixed_clean_correct, robust_lower_bound
from .choice import Choice
from .criteria import Criterion, ExactCriterion
from .exploration import Selection
from .grid import kept_images
from .inputs import CachedLogits
from .kernel import Slab

N_CANDIDATES, N_CUTOFFS = 128, 48  # of the pool
_SPREAD = 5.0  # standard deviations of the kept count around the constraint within which resamples put the cutoff
_OUT_OF_BAG = 0.632  # Efron's weight: a resample holds this share of the images, so left-out ones are a bit too harsh


def with_predictions(
    choice: Choice,
    cached: CachedLogits,
    *,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    kept_B: Tensor | None = None,
) -> Choice:
    """The choice with the clean and the kept images that it predicts, and bootstrap intervals over the images.

    `kept_B` says which images stay right, where more is known of them than one attacked point each.
    """
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; the usual value is 0.95")
    if not len(cached.labels_B):
        raise InvalidInputError("cached has no image: there is nothing to predict from")
    clean_B, held_B = predicted_outcomes(choice, cached)
    if kept_B is not None:
        held_B = kept_B & (cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B)
    tail = (1 - confidence) / 2

    def interval(outcomes_B: Tensor) -> tuple[float, float]:
        # Percentiles; the number of successes in n images drawn with replacement is binomial.
        generator = torch.Generator().manual_seed(seed)
        counts = torch.full((n_resamples,), float(len(outcomes_B)), dtype=torch.float64)
        shares = torch.full_like(counts, float(outcomes_B.double().mean()))
        draws = torch.binomial(counts, shares, generator=generator) / len(outcomes_B)
        low, high = torch.quantile(draws, draws.new_tensor([tail, 1 - tail])).tolist()
        return low, high

    return replace(
        choice,
        clean_correct=int(clean_B.sum()),
        kept_predicted=int(held_B.sum()),
        total=len(clean_B),
        clean_interval=interval(clean_B),
        kept_interval=interval(held_B),
    )


def predicted_outcomes(choice: Choice, cached: CachedLogits) -> tuple[Tensor, Tensor]:
    """(right on the clean image, robust for rob and right on the attacked one whatever std says), bool (B,) each."""
    mixture = choice.mixture()
    clean_B = mixed_clean_correct(cached.rob_clean_BK, cached.labels_B, cached.std_pred_B, mixture)
    robust_B = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    return clean_B, robust_B & robust_lower_bound(cached.rob_attacked_BK, cached.labels_B, mixture)


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
class HonestShare:
    """A predicted share of images: as it was seen, corrected for the search's optimism, with an interval."""

    raw: float
    corrected: float
    low: float  # of the interval of the corrected value
    high: float


@dataclass(frozen=True)
class HonestPrediction:
    """Both shares of all images that a choice predicts."""

    clean: HonestShare
    kept: HonestShare  # robust for rob, and kept


def honest_prediction(
    choice: Choice,
    searched: Sequence[tuple[ExactCriterion, Selection]],
    robust_N: Tensor,
    *,
    n_resamples: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> HonestPrediction:
    """The corrected prediction of a choice at its `beta`, with intervals that repeat the search on each resample.

    Args:
        searched: the grids that were searched for it, with their criteria.
        robust_N: which images rob is robust on, bool, in the order of the clean images; they are the constraint's.

    Raises:
        InvalidInputError: for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; the usual value is 0.95")
    candidates, n_images = _pool(choice, searched), len(robust_N)
    generator = torch.Generator().manual_seed(seed)
    drawn_RN = torch.randint(n_images, (n_resamples, n_images), generator=generator)
    weights_RN = torch.zeros(n_resamples, n_images).scatter_add_(1, drawn_RN, torch.ones(n_resamples, n_images))
    counted = []  # float32 counts exactly up to 2^24
    for criterion, at in candidates:
        clean_LN, kept_LN = _outcomes(criterion, at, choice.beta, robust_N)
        counted.append((clean_LN @ weights_RN.T, kept_LN @ weights_RN.T))
    clean_CR, kept_CR = (torch.cat(parts) for parts in zip(*counted, strict=True))
    n_robust_R = (weights_RN @ robust_N.float()).long().tolist()
    needed_R = torch.tensor([kept_images(choice.beta, n) for n in n_robust_R], dtype=torch.float32)
    # Most clean images, then most kept, among the members that keep enough; where none does, the one that keeps most.
    rank_CR = (clean_CR * (n_images + 1) + kept_CR).masked_fill(kept_CR < needed_R, -torch.inf)
    best_R = torch.where(rank_CR.amax(dim=0).isfinite(), rank_CR.argmax(dim=0), kept_CR.argmax(dim=0))
    # The rows of the members that are best on some resample, once more.
    sizes = torch.tensor([len(clean_LR) for clean_LR, _ in counted])
    of_R, starts = torch.arange(len(sizes)).repeat_interleave(sizes)[best_R], sizes.cumsum(0) - sizes
    clean_RN, kept_RN = torch.empty_like(weights_RN), torch.empty_like(weights_RN)
    for i in sorted(set(of_R.tolist())):
        criterion, at = candidates[i]
        clean_LN, kept_LN = _outcomes(criterion, at, choice.beta, robust_N)
        mine_r = (of_R == i).nonzero().squeeze(1)
        rows_r = best_R[mine_r] - starts[i]
        clean_RN[mine_r], kept_RN[mine_r] = clean_LN[rows_r], kept_LN[rows_r]
    left_out_RN = (weights_RN == 0).float()
    index_R = torch.arange(n_resamples)
    shares = {
        name: _honest(raw, seen_CR[best_R, index_R] / n_images, right_RN, left_out_RN, confidence)
        for name, raw, seen_CR, right_RN in (
            ("clean", choice.clean_correct / choice.total if choice.total else choice.objective, clean_CR, clean_RN),
            ("kept", choice.kept_predicted / n_images, kept_CR, kept_RN),
        )
    }
    return HonestPrediction(**shares)


def corrected(choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor) -> Choice:
    """The choice with its corrected shares and with intervals that repeat the search, where its criterion is exact.

    An interval is widened to hold the raw share as well, which a flattering search may leave above it.
    """
    exact = [(criterion, part) for criterion, part in searched if isinstance(criterion, ExactCriterion)]
    if not exact:
        return choice
    found = honest_prediction(choice, exact, robust_N)
    clean, kept = found.clean, found.kept
    return replace(
        choice,
        clean_corrected=clean.corrected,
        kept_corrected=kept.corrected,
        clean_interval=(min(clean.low, clean.raw), max(clean.high, clean.raw)),
        kept_interval=(min(kept.low, kept.raw), max(kept.high, kept.raw)),
    )


def _honest(raw: float, seen_R: Tensor, right_RN: Tensor, left_out_RN: Tensor, confidence: float) -> HonestShare:
    out_of_bag_R = (right_RN * left_out_RN).sum(dim=1) / left_out_RN.sum(dim=1).clamp_min(1)
    corrected = raw - _OUT_OF_BAG * float((seen_R - out_of_bag_R).mean())
    errors_R = seen_R - right_RN.mean(dim=1)
    tail = (1 - confidence) / 2
    low, high = torch.quantile(errors_R - errors_R.mean(), torch.tensor([tail, 1 - tail])).tolist()
    # The estimate exceeds the truth by as much as a resample's exceeds that of all images: its upper end is subtracted.
    return HonestShare(raw, *(min(1.0, max(0.0, value)) for value in (corrected, corrected - high, corrected - low)))


def _pool(
    choice: Choice, searched: Sequence[tuple[ExactCriterion, Selection]]
) -> list[tuple[ExactCriterion, tuple[float, float, float]]]:
    """The candidates with the best counts at the choice's beta."""
    entries = []
    for criterion, selection in searched:
        counts = selection.objectives[selection.betas.index(choice.beta)].flatten().nan_to_num(nan=-1.0)
        entries += [(float(counts[i]), criterion, at) for i, at in enumerate(selection.grid) if counts[i] >= 0]
    entries.sort(key=lambda entry: -entry[0])
    return [(criterion, at) for _, criterion, at in entries[:N_CANDIDATES]]


def _outcomes(
    criterion: ExactCriterion, at: tuple[float, float, float], beta: float, robust_N: Tensor
) -> tuple[Tensor, Tensor]:
    """What a candidate gets right at each cutoff that a resample may lead to, (L, N) each: clean images, kept ones."""
    scale, power, bias = at
    attacked_n, open_N, rob_right_E, open_E = criterion.values(Slab(bias, criterion.clamp, (power,), (scale,)))
    n_images = len(attacked_n)
    needed, spread = kept_images(beta, n_images), _SPREAD * (n_images * beta * (1 - beta)) ** 0.5 + 1
    first, last = max(1, int(needed - spread)), min(n_images, int(needed + spread) + 1)
    ranks = torch.linspace(first, last, min(N_CUTOFFS, last - first + 1)).round().long()
    cutoffs_L = attacked_n.sort().values[ranks - 1].clamp(max=0.0)
    std_right_N = criterion.std_pred_N == criterion.clean_labels_N
    clean_LN = std_right_N.expand(len(cutoffs_L), -1).clone()
    clean_LN[:, open_N] = (open_E < cutoffs_L[:, None]) == rob_right_E
    kept_LN = torch.zeros(len(cutoffs_L), len(robust_N))
    kept_LN[:, robust_N] = (attacked_n <= cutoffs_L[:, None]).float()
    return clean_LN.float(), kept_LN

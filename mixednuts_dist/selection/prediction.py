"""What a choice is predicted to reach: on the cached images exactly, on other images with a correction and an interval.

A choice is the best one on the images that were searched, partly because it fits these images: on others it reaches
less. The correction estimates by how much. Each resample (images drawn with replacement, as multiplicities) is searched
again, and the resulting choice is counted on the resample, on the images that the resample left out, and on all images.
The mean of the first minus the second is the optimism, which is subtracted; the spread of the first minus the third is
that of an estimate around what it estimates, which makes the interval.

The search is repeated over a pool: the candidates with the best counts, each with the cutoffs around the constraint's.
What a member of the pool gets right is one row of zeros and ones, so all members on all resamples are one product of
matrices.

Shapes: B and N images, C members of the pool, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.mixture import mixed_clean_correct, robust_lower_bound
from .choice import Choice
from .criteria import Criterion
from .exploration import Selection
from .grid import kept_images
from .inputs import CachedLogits

N_CANDIDATES, N_CUTOFFS = 32, 24  # of the pool
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
    _require_confidence(confidence)
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
    searched: Sequence[tuple[Criterion, Selection]],
    robust_N: Tensor,
    *,
    n_resamples: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> HonestPrediction | None:
    """The corrected prediction of a choice at its `beta`, with intervals that repeat the search on each resample.

    Args:
        searched: the grids that were searched for it, with their criteria.
        robust_N: which images rob is robust on, bool, in the order of the clean images; they are the constraint's.

    Returns:
        None where the criterion cannot say which single images a candidate gets right.

    Raises:
        InvalidInputError: for a confidence outside (0, 1).
    """
    _require_confidence(confidence)
    pool = _pool(choice, searched, robust_N)
    if pool is None:
        return None
    (clean_CN, kept_CN), n_images = pool, len(robust_N)
    generator = torch.Generator().manual_seed(seed)
    drawn_RN = torch.randint(n_images, (n_resamples, n_images), generator=generator)
    weights_RN = torch.zeros(n_resamples, n_images).scatter_add_(1, drawn_RN, torch.ones(n_resamples, n_images))
    clean_CR, kept_CR = clean_CN @ weights_RN.T, kept_CN @ weights_RN.T  # float32 counts exactly up to 2^24
    needed_R = torch.tensor([kept_images(choice.beta, n) for n in (weights_RN @ robust_N.float()).long().tolist()])
    # Most clean images, then most kept, among the members that keep enough; where none does, the one that keeps most.
    rank_CR = (clean_CR.double() * (n_images + 1) + kept_CR).masked_fill(kept_CR < needed_R, -torch.inf)
    best_R = torch.where(rank_CR.amax(dim=0).isfinite(), rank_CR.argmax(dim=0), kept_CR.argmax(dim=0))
    index_R, left_out_RN = torch.arange(n_resamples), (weights_RN == 0).float()

    def share(raw: float, right_CN: Tensor, counts_CR: Tensor) -> HonestShare:
        return _honest(raw, counts_CR[best_R, index_R] / n_images, right_CN[best_R], left_out_RN, confidence)

    clean = choice.clean_correct / choice.total if choice.total else choice.objective
    return HonestPrediction(
        clean=share(clean, clean_CN, clean_CR), kept=share(choice.kept_predicted / n_images, kept_CN, kept_CR)
    )


def corrected(choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor) -> Choice:
    """The choice with its corrected shares and with intervals that repeat the search, where its criterion can say it.

    An interval is widened to hold the raw share as well, which a flattering search may leave above it.
    """
    found = honest_prediction(choice, searched, robust_N)
    if found is None:
        return choice
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
    choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What each member gets right, (C, N) each, float32: the clean images, and the attacked ones that rob is right on.

    A member is one of the candidates with the best counts at the choice's beta, with a cutoff that a resample may lead
    to: the number of images that it keeps lies within `_SPREAD` standard deviations of what beta asks for.
    """
    entries = []
    for criterion, selection in searched:
        objectives = selection.objectives[selection.betas.index(choice.beta)].flatten()
        better = objectives if criterion.maximised else -objectives
        entries += [(float(better[i]), criterion, at) for i, at in enumerate(selection.grid) if better[i] == better[i]]
    entries.sort(key=lambda entry: -entry[0])
    n_robust = int(robust_N.sum())
    needed, spread = kept_images(choice.beta, n_robust), _SPREAD * (n_robust * choice.beta * (1 - choice.beta)) ** 0.5
    first, last = max(1, int(needed - spread - 1)), min(n_robust, int(needed + spread + 1) + 1)
    kept = torch.linspace(first, last, min(N_CUTOFFS, last - first + 1)).round().long().tolist()
    clean, held = [], []
    for _, criterion, at in entries[:N_CANDIDATES]:
        if (found := criterion.outcomes(at, kept)) is None:
            return None
        clean.append(found[0].float())
        held.append(
            torch.zeros(len(kept), len(robust_N)).masked_scatter_(robust_N.expand(len(kept), -1), found[1].float())
        )
    return torch.cat(clean), torch.cat(held)


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence={confidence} must be between 0 and 1; the usual value is 0.95")

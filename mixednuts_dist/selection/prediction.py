"""Predictions of a choice: exact on the stored images, and for other images with a correction and an interval.

A choice is the best one on the images that were searched, partly because it fits these images, so on others it reaches
less. The correction estimates by how much. Each resample (images drawn with replacement, as multiplicities) is searched
again, and the resulting choice is counted on the resample, on the images that the resample left out, and on all images.
The mean of the first count minus the second is the optimism, which is subtracted. The distribution of the first minus
the third is that of an estimate around its true value, which gives the interval.

The search is repeated over a pool: the candidates with the best counts, each with cutoffs near that of the constraint.
The images that a member of the pool gets right are one row of zeros and ones, so the counts of all members on all
resamples are one product of matrices.

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
_OUT_OF_BAG = 0.632  # Efron's weight: a resample holds this share of the images, so counts on the others are too low
_TAIL = 0.025  # at each end of a 95 % interval


def with_predictions(choice: Choice, cached: CachedLogits, *, kept_B: Tensor | None = None) -> Choice:
    """The choice with the clean and the kept images that it predicts, and 95 % bootstrap intervals over the images.

    `kept_B` are the images that stay right, where more than one attacked point an image is known.
    """
    if not len(cached.labels_B):
        raise InvalidInputError("cached has no image: there is nothing to predict from")
    clean_B, held_B = predicted_outcomes(choice, cached)
    if kept_B is not None:
        held_B = kept_B & (cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B)

    from scipy.stats import binom  # takes most of a second to import

    def interval(outcomes_B: Tensor) -> tuple[float, float]:
        # The percentile interval of infinitely many resamples: successes among n images drawn with replacement are
        # binomial.
        n = len(outcomes_B)
        low, high = binom.ppf([_TAIL, 1 - _TAIL], n, float(outcomes_B.double().mean())) / n
        return float(low), float(high)

    return replace(
        choice,
        clean_correct=int(clean_B.sum()),
        kept_predicted=int(held_B.sum()),
        n_robust=int((cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B).sum()),
        total=len(clean_B),
        clean_interval=interval(clean_B),
        kept_interval=interval(held_B),
    )


def predicted_outcomes(choice: Choice, cached: CachedLogits) -> tuple[Tensor, Tensor]:
    """(right on the clean image, robust for rob and right on the attacked one for any class of std), bool (B,) each."""
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
        f"beta {exact.beta}: the paper's criterion would choose s = {paper.scale:.4g}, p = {paper.power:.4g}, "
        f"c = {paper.bias:.4g}, with which the mixture gets {n_paper} of {len(cached.labels_B)} clean images "
        f"right; the exact criterion's choice gets {n_exact}."
    )


@dataclass(frozen=True)
class HonestShare:
    """A predicted share of images: on the searched ones, and corrected for the search's optimism with an interval."""

    raw: float
    corrected: float
    low: float  # of the interval of the corrected value
    high: float


def honest_prediction(
    choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor, *, n_resamples: int = 200
) -> tuple[HonestShare, HonestShare] | None:
    """The clean and the kept share of all images, corrected, with 95 % intervals that repeat the search on resamples.

    Args:
        searched: the grids that were searched for it, with their criteria.
        robust_N: which images rob is robust on, bool, in the order of the clean images; they are the constraint's.

    Returns:
        None for a criterion without outcomes of single images.
    """
    pool = _pool(choice, searched, robust_N)
    if pool is None:
        return None
    (clean_CN, kept_CN), n_images = pool, len(robust_N)
    generator = torch.Generator().manual_seed(0)
    drawn_RN = torch.randint(n_images, (n_resamples, n_images), generator=generator)
    weights_RN = torch.zeros(n_resamples, n_images).scatter_add_(1, drawn_RN, torch.ones(n_resamples, n_images))
    clean_CR, kept_CR = clean_CN @ weights_RN.T, kept_CN @ weights_RN.T  # float32 counts exactly up to 2^24
    needed_R = torch.tensor([kept_images(choice.beta, n) for n in (weights_RN @ robust_N.float()).long().tolist()])
    # Most clean images, then most kept, among the members that keep enough; where none does, the one that keeps most.
    rank_CR = (clean_CR.double() * (n_images + 1) + kept_CR).masked_fill(kept_CR < needed_R, -torch.inf)
    best_R = torch.where(rank_CR.amax(dim=0).isfinite(), rank_CR.argmax(dim=0), kept_CR.argmax(dim=0))
    index_R, left_out_RN = torch.arange(n_resamples), (weights_RN == 0).float()

    def share(raw: float, right_CN: Tensor, counts_CR: Tensor) -> HonestShare:
        return _honest(raw, counts_CR[best_R, index_R] / n_images, right_CN[best_R], left_out_RN)

    clean = choice.clean_correct / choice.total if choice.total else choice.objective
    return share(clean, clean_CN, clean_CR), share(choice.kept_predicted / n_images, kept_CN, kept_CR)


def corrected(choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor) -> Choice:
    """The choice with its corrected shares and intervals; unchanged for a criterion without outcomes of single images.

    An interval is widened to hold the raw share, which may lie above it.
    """
    found = honest_prediction(choice, searched, robust_N)
    if found is None:
        return choice
    clean, kept = found
    return replace(
        choice,
        clean_corrected=clean.corrected,
        kept_corrected=kept.corrected,
        clean_interval=(min(clean.low, clean.raw), max(clean.high, clean.raw)),
        kept_interval=(min(kept.low, kept.raw), max(kept.high, kept.raw)),
    )


def _honest(raw: float, seen_R: Tensor, right_RN: Tensor, left_out_RN: Tensor) -> HonestShare:
    out_of_bag_R = (right_RN * left_out_RN).sum(dim=1) / left_out_RN.sum(dim=1).clamp_min(1)
    corrected = raw - _OUT_OF_BAG * float((seen_R - out_of_bag_R).mean())
    errors_R = seen_R - right_RN.mean(dim=1)
    low, high = torch.quantile(errors_R - errors_R.mean(), torch.tensor([_TAIL, 1 - _TAIL])).tolist()
    # The estimate exceeds the truth by as much as a resample's exceeds that of all images: its upper end is subtracted.
    return HonestShare(raw, *(min(1.0, max(0.0, value)) for value in (corrected, corrected - high, corrected - low)))


def _pool(
    choice: Choice, searched: Sequence[tuple[Criterion, Selection]], robust_N: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The images that each member gets right, (C, N) each, float32: clean ones, and attacked ones that rob gets right.

    A member is one of the candidates with the best counts at the choice's beta, with a cutoff that a resample may lead
    to: it keeps a number of images within `_SPREAD` standard deviations of that of beta.
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

"""Predictions of a choice: exact counts on the stored images, with binomial intervals.

The images that the search read also made the choice, so on other images a choice reaches a little less than predicted.
The evaluation measures how much.

Shapes: B images.
"""

from dataclasses import replace

from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.mixture import mixed_clean_correct, robust_lower_bound
from .choice import Choice
from .inputs import CachedLogits

_TAIL = 0.025  # at each end of a 95% interval


def with_predictions(choice: Choice, cached: CachedLogits, *, kept_B: Tensor | None = None) -> Choice:
    """Return the choice with the clean and robust images that it predicts, and 95% binomial intervals.

    `kept_B` are the images that remain robust, if more than one adversarial example per image is known.
    """
    if not len(cached.labels_B):
        raise InvalidInputError("cached has no image: there is nothing to predict from")
    clean_B, held_B = predicted_outcomes(choice, cached)
    if kept_B is not None:
        held_B = kept_B & (cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B)

    from scipy.stats import binom  # takes most of a second to import

    def interval(outcomes_B: Tensor) -> tuple[float, float]:
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
    """Return which clean images are correct, and which robust ones stay correct for any class of `std`, bool (B,)."""
    mixture = choice.mixture()
    clean_B = mixed_clean_correct(cached.rob_clean_BK, cached.labels_B, cached.std_pred_B, mixture)
    robust_B = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    return clean_B, robust_B & robust_lower_bound(cached.rob_attacked_BK, cached.labels_B, mixture)


def compare_candidates(paper: Choice, exact: Choice, cached: CachedLogits) -> str | None:
    """Return a warning if the choice `paper` is less accurate on these images than the choice `exact`."""
    n_paper, n_exact = (int(predicted_outcomes(choice, cached)[0].sum()) for choice in (paper, exact))
    if n_paper >= n_exact:
        return None
    return (
        f"beta {exact.beta}: the paper's criterion would choose s = {paper.scale:.4g}, p = {paper.power:.4g}, "
        f"c = {paper.bias:.4g}, with which the mixture gets {n_paper} of {len(cached.labels_B)} clean images "
        f"right; the exact criterion's choice gets {n_exact}."
    )

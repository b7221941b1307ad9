"""Predictions of a choice: exact counts on the stored images, with binomial intervals.

The search makes a choice on the same images, so on other images the choice reaches a little less than predicted. The
evaluation measures how much.

Shapes: B images, P adversarial examples, K classes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..mixing.margins import log_one_minus_lead, log_one_minus_signed_margin
from ..mixing.mixture import mixed_classes, robust_lower_bound
from ..mixing.transforms import LogitMap
from .choice import Choice, weights_at
from .inputs import CachedLogits

_TAIL = 0.025  # at each end of a 95% interval
STEP_ROUNDING = 1e-9  # relative distance at which a margin equals the threshold


def with_predictions(choice: Choice, cached: CachedLogits) -> Choice:
    """Return the choice with its predicted numbers of correct and of robust images, and their 95% intervals.

    If the rows have `points`, the margin threshold is first centered (`centered_threshold`), and an image counts as
    robust if the choice keeps it at its hardest example.
    """
    robust_B = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    if cached.points is None:
        held_B = robust_B & robust_lower_bound(cached.rob_attacked_BK, cached.labels_B, choice.mixture())
    else:
        choice = centered_threshold(choice, cached)
        held_B = robust_B & (hardest_log1m_margins(cached, choice.transform()) <= choice.log_one_minus_cutoff)
    clean_B = mixed_classes(cached.rob_clean_BK, cached.std_pred_B, choice.mixture()) == cached.labels_B

    from scipy.stats import binom  # takes most of a second to import

    def interval(outcomes_B: Tensor) -> tuple[float, float]:
        n = len(outcomes_B)
        low, high = binom.ppf([_TAIL, 1 - _TAIL], n, float(outcomes_B.double().mean())) / n
        return float(low), float(high)

    return replace(
        choice,
        clean_correct=int(clean_B.sum()),
        kept_predicted=int(held_B.sum()),
        n_robust=int(robust_B.sum()),
        total=len(clean_B),
        clean_interval=interval(clean_B),
        kept_interval=interval(held_B),
    )


def hardest_log1m_margins(cached: CachedLogits, transform: LogitMap, *, any_std: bool = False) -> Tensor:
    """Return log(1 - margin) of M(rob) at the hardest stored example of each image, (B,), float64.

    With `any_std`, the margins are signed ones, which hold for any class of the standard classifier. Otherwise, as in
    the search, the margin at an example in `points` is the lead of the label over the class of the standard classifier,
    if that class is wrong and both `rob` and M(rob) are right.
    """
    examples = cached.examples()
    rob_PK, image_P, std_P = examples.rob_logits_PK, examples.image_P, examples.std_pred_P
    mapped_PK, labels_P = transform(rob_PK.double()), cached.labels_B[image_P]
    log1m_P = log_one_minus_signed_margin(mapped_PK, labels_P)
    if not any_std:
        leads_P = (rob_PK.argmax(dim=1) == labels_P) & (mapped_PK.argmax(dim=1) == labels_P) & (std_P != labels_P)
        log1m_P = torch.where(leads_P, log_one_minus_lead(mapped_PK, labels_P, std_P), log1m_P)
    return log1m_P[: len(cached.labels_B)].scatter_reduce(0, image_P, log1m_P, "amax")


def centered_threshold(choice: Choice, cached: CachedLogits) -> Choice:
    """Return the candidate with a lower margin threshold, in the middle of the interval with the same clean accuracy.

    The search puts the threshold at an order statistic, so it equals the margin of one image, and any attack that
    lowers that margin breaks the image. A lower threshold keeps at least as many images robust. The clean accuracy
    changes only at a lead `p_t - p_k` of the class of M(rob) over that of `std` on a clean image. The new threshold
    lies halfway to the next such lead.
    """
    mapped_BK = choice.transform()(cached.rob_clean_BK.double())
    log1m_B = log_one_minus_lead(mapped_BK, mapped_BK.argmax(dim=1), cached.std_pred_B)
    start = choice.log_one_minus_cutoff
    above_B = log1m_B[(log1m_B > start + STEP_ROUNDING * abs(start)) & (log1m_B < 0)]
    middle = (start + (float(above_B.min()) if len(above_B) else 0.0)) / 2
    return replace(choice, **weights_at(middle))

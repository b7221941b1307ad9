"""What the T = 0 mixture answers, from rob's logits and std's classes alone: exact, without running the mixture.

With temperature 0 std adds `1 - alpha` to the probability of one class k. So the mixture answers M(rob)'s top class t
where `alpha p_t > alpha p_k + 1 - alpha`, that is where the gap `p_t - p_k` exceeds the cutoff
`q = (1 - alpha) / alpha`, and k elsewhere. And an image that M(rob) gets right with a signed margin of at least q stays
right whatever std says, because q is the most that std can add to any other class (paper, lemma behind theorem 4.3).

Shapes: B images, K classes. Logits are rob's raw ones.
"""

import math

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .margins import class_indices, log_one_minus_gap, log_one_minus_signed_margin, require_logits
from .mixture import Mixture

_ROUNDING = 1e-14  # of the logits, of log(1 - cutoff) and of alpha: the image at the cutoff itself must reach it


def mixed_classes(rob_logits_BK: Tensor, std_pred_B: Tensor, mixture: Mixture) -> Tensor:
    """The classes that the T = 0 mixture predicts, shape (B,), from rob's logits and std's classes.

    >>> from mixednuts_dist.mixing.transforms import IdentityTransform
    >>> rob = torch.tensor([[3.0, 0.0], [0.5, 0.0]])  # rob prefers class 0: surely, then hardly
    >>> mixed_classes(rob, torch.tensor([1, 1]), Mixture(IdentityTransform(), 0.6, 0.4)).tolist()
    [0, 1]
    """
    require_logits("rob_logits_BK", rob_logits_BK)
    std_pred_B = class_indices("std_pred_B", std_pred_B, rob_logits_BK)
    mapped_BK = mixture.transform(rob_logits_BK.double())
    top_B = mapped_BK.argmax(dim=1)
    rob_wins_B = log_one_minus_gap(mapped_BK, top_B, std_pred_B) < log_one_minus_cutoff(mixture)
    return torch.where(rob_wins_B, top_B, std_pred_B)


def mixed_clean_correct(rob_clean_BK: Tensor, labels_B: Tensor, std_pred_B: Tensor, mixture: Mixture) -> Tensor:
    """Which clean images the T = 0 mixture gets right, shape (B,), bool: exact, without running it."""
    classes_B = mixed_classes(rob_clean_BK, std_pred_B, mixture)
    return classes_B == class_indices("labels_B", labels_B, rob_clean_BK)


def robust_lower_bound(rob_attacked_BK: Tensor, labels_B: Tensor, mixture: Mixture) -> Tensor:
    """Which attacked images the mixture gets right for any std, shape (B,), bool: signed margin >= cutoff."""
    require_logits("rob_attacked_BK", rob_attacked_BK)
    labels_B = class_indices("labels_B", labels_B, rob_attacked_BK)
    mapped_BK = mixture.transform(rob_attacked_BK.double())
    log_cutoff = log_one_minus_cutoff(mixture)
    if log_cutoff == -math.inf:
        return torch.zeros_like(labels_B, dtype=torch.bool)
    rounding_B = _ROUNDING * (mapped_BK.abs().amax(dim=1) - log_cutoff + math.expm1(-log_cutoff))
    reached_B: Tensor = log_one_minus_signed_margin(mapped_BK, labels_B) <= log_cutoff + rounding_B
    return reached_B


def log_one_minus_cutoff(mixture: Mixture) -> float:
    """`log(1 - (1 - alpha) / alpha)`; -inf up to alpha = 1/2, where no margin of rob outweighs std."""
    for name, value in (("alpha", mixture.alpha), ("one_minus_alpha", mixture.one_minus_alpha)):
        if not 0 <= value <= 1:
            raise InvalidInputError(f"{name}={value} must be in [0, 1]")
    if mixture.alpha <= mixture.one_minus_alpha:
        return -math.inf
    return math.log1p(-mixture.one_minus_alpha / mixture.alpha)

"""Mix the probabilities of two classifiers in log space (paper, equation 1, appendix B.2), and predict in closed form.

At temperature 0, the predicted class follows from the logits of `rob` and the class of `std`, without another pass.
`std` adds `1 - alpha` to the probability of the one class k that it predicts. So the top class t of M(rob) is predicted
if `alpha p_t > alpha p_k + 1 - alpha`, that is, if the difference `p_t - p_k` exceeds the margin threshold
`q = (1 - alpha) / alpha`. Otherwise k is predicted. If M(rob) classifies an image correctly with a signed margin of at
least q, the image is classified correctly for any class of `std`, because `std` can close a difference of at most q
(paper, theorem 4.3).

Shapes: B images, K classes. `rob_..._BK` are raw logits of `rob`; the others are float64.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .margins import class_indices, log_one_minus_lead, log_one_minus_signed_margin, require_logits
from .transforms import LogitMap

_ROUNDING = 1e-14  # relative rounding of logits, log(1 - threshold) and alpha, so that images at the threshold count
_WEIGHTS_ROUNDING = 1e-9  # for weights that a user has typed
_LOG_FLOOR = math.log(1e-300)  # replaces log(0) if an entry would otherwise be -inf


@dataclass(frozen=True)
class Mixture:
    """The parameters of a mixed classifier, apart from the two base classifiers.

    >>> from mixednuts_dist.mixing.transforms import IdentityTransform
    >>> Mixture(IdentityTransform(), alpha=0.75).one_minus_alpha
    0.25

    Raises:
        InvalidInputError: if a weight is outside [0, 1], weights do not add up to 1, or the temperature is negative.
    """

    transform: LogitMap  # maps the logits of `rob`
    alpha: float  # weight of `rob`
    one_minus_alpha: float = math.nan  # weight of `std`; by default `1 - alpha`, which loses digits for alpha near 1
    temperature: float = 0.0  # divides the logits of `std`; 0 replaces its probabilities by the one-hot class
    surrogate_alpha: float = 0.95  # alpha_d, the weight of `rob` in f_aux, whose gradients attacks follow
    rd: float = 0.9  # share of that weight for the raw logits of `rob`; the rest is for the transformed ones

    def __post_init__(self) -> None:
        if math.isnan(self.one_minus_alpha):  # the default: a frozen dataclass is set this way
            object.__setattr__(self, "one_minus_alpha", 1.0 - self.alpha)
        for name in ("alpha", "one_minus_alpha", "surrogate_alpha", "rd"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInputError(f"{name}={getattr(self, name)} must be in [0, 1]")
        if abs(self.alpha + self.one_minus_alpha - 1) > _WEIGHTS_ROUNDING:
            raise InvalidInputError(f"alpha={self.alpha} and one_minus_alpha={self.one_minus_alpha} must add up to 1")
        if not self.temperature >= 0:
            raise InvalidInputError(f"temperature={self.temperature} must be 0 (one-hot) or positive")

    def settings(self) -> dict[str, Any]:
        """Return plain values that determine the predictions."""
        kind, values = type(self.transform).__name__, self.transform.settings()
        weights = {"one_minus_alpha": self.one_minus_alpha, "temperature": self.temperature}
        return {"transform": kind, **values, **weights}

    def weights(self) -> dict[str, float]:
        """Return all but the transform, as keyword arguments of `Mixture` and of `MixedClassifier`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "transform"}

    def log_probs(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """Return f_mix, the logs of the mixed probabilities, from raw logits; float64, always finite.

        If alpha = 0 and `std` is one-hot, all classes but one would have probability 0. The probabilities of `rob` then
        get the weight 1e-300, so that the logs are finite and ordered.
        """
        log_alpha, log_rest = (
            math.log(weight) if weight > 0 else -math.inf for weight in (self.alpha, self.one_minus_alpha)
        )
        if self.temperature == 0:
            log_alpha = max(log_alpha, _LOG_FLOOR)
        std_BK = tempered_log_probs(std_logits_BK.double(), self.temperature)
        rob_BK = self.transform(rob_logits_BK.double()).log_softmax(dim=1)
        return torch.logaddexp(std_BK + log_rest, rob_BK + log_alpha)

    def log_surrogate_probs(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """Return f_aux from the raw logits of the base classifiers, float64, (B, K).

        f_aux = `log((1 - a_d) softmax(std) + a_d r_d softmax(rob) + a_d (1 - r_d) softmax(M(rob)))`.
        """
        alpha_d, rob_BK = self.surrogate_alpha, rob_logits_BK.double()
        weights = (1 - alpha_d, alpha_d * self.rd, alpha_d * (1 - self.rd))
        logits = (std_logits_BK.double(), rob_BK, self.transform(rob_BK))
        parts = [z_BK.log_softmax(dim=1) + math.log(w) for w, z_BK in zip(weights, logits, strict=True) if w > 0]
        return torch.stack(parts).logsumexp(dim=0)

    def classes(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """Return the predicted classes, (B,), from the raw logits of the base classifiers.

        At T = 0 the closed form is used, because sums of probabilities lose the digits of a margin threshold near 1.
        """
        if self.temperature == 0:
            return mixed_classes(rob_logits_BK, std_logits_BK.argmax(dim=1), self)
        return self.log_probs(std_logits_BK, rob_logits_BK).argmax(dim=1)


def tempered_log_probs(logits_BK: Tensor, temperature: float) -> Tensor:
    """Return `log softmax(logits / T)`; for T = 0, return 0 at the predicted class and -inf at all others."""
    if temperature > 0:
        return (logits_BK / temperature).log_softmax(dim=1)
    one_hot_BK = torch.full_like(logits_BK, -torch.inf)
    return one_hot_BK.scatter(1, logits_BK.argmax(dim=1, keepdim=True), 0.0)


def mixed_classes(rob_logits_BK: Tensor, std_pred_B: Tensor, mixture: Mixture) -> Tensor:
    """Return the classes that are predicted at T = 0, (B,), from the logits of `rob` and the classes of `std`.

    >>> from mixednuts_dist.mixing.transforms import IdentityTransform
    >>> rob = torch.tensor([[3.0, 0.0], [0.5, 0.0]])  # class 0 leads clearly, then hardly
    >>> mixed_classes(rob, torch.tensor([1, 1]), Mixture(IdentityTransform(), 0.6, 0.4)).tolist()
    [0, 1]
    """
    require_logits("rob_logits_BK", rob_logits_BK)
    std_pred_B = class_indices("std_pred_B", std_pred_B, rob_logits_BK)
    mapped_BK = mixture.transform(rob_logits_BK.double())
    top_B = mapped_BK.argmax(dim=1)
    rob_wins_B = log_one_minus_lead(mapped_BK, top_B, std_pred_B) < log_one_minus_threshold(mixture)
    return torch.where(rob_wins_B, top_B, std_pred_B)


def robust_lower_bound(rob_attacked_BK: Tensor, labels_B: Tensor, mixture: Mixture) -> Tensor:
    """Return which attacked images stay correct for any class of `std`, (B,) bool: signed margin >= threshold."""
    require_logits("rob_attacked_BK", rob_attacked_BK)
    labels_B = class_indices("labels_B", labels_B, rob_attacked_BK)
    mapped_BK = mixture.transform(rob_attacked_BK.double())
    log_threshold = log_one_minus_threshold(mixture)
    if log_threshold == -math.inf:
        return torch.zeros_like(labels_B, dtype=torch.bool)
    rounding_B = _ROUNDING * (mapped_BK.abs().amax(dim=1) - log_threshold + math.expm1(-log_threshold))
    reached_B: Tensor = log_one_minus_signed_margin(mapped_BK, labels_B) <= log_threshold + rounding_B
    return reached_B


def log_one_minus_threshold(mixture: Mixture) -> float:
    """Return `log(1 - (1 - alpha) / alpha)`; -inf up to alpha = 1/2, where no margin of `rob` outweighs `std`."""
    if mixture.alpha <= mixture.one_minus_alpha:
        return -math.inf
    return math.log1p(-mixture.one_minus_alpha / mixture.alpha)

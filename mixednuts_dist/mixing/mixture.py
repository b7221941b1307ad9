"""The mixture of two classifiers' probabilities, in log space (paper, equation 1 and appendix B.2).

Shapes: B images, K classes. All tensors here are float64.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .transforms import LogitMap

_LOG_FLOOR = math.log(1e-300)  # stands for log(0) where an entry would otherwise be -inf


@dataclass(frozen=True)
class Mixture:
    """One way to put std and rob together: all that a mixed classifier needs beside the two."""

    transform: LogitMap  # of rob's logits
    alpha: float
    one_minus_alpha: float
    temperature: float = 0.0  # of std

    def settings(self) -> dict[str, Any]:
        """Plain values that tell this mixture from any other."""
        kind, values = type(self.transform).__name__, self.transform.settings()
        weights = {"one_minus_alpha": self.one_minus_alpha, "temperature": self.temperature}
        return {"transform": kind, **values, **weights}

    def classes(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """The classes that the mixture predicts, shape (B,), from the base classifiers' raw logits."""
        mixed_BK = log_mixture(
            tempered_log_probs(std_logits_BK.double(), self.temperature),
            self.transform(rob_logits_BK.double()).log_softmax(dim=1),
            alpha=self.alpha,
            one_minus_alpha=self.one_minus_alpha,
            std_is_one_hot=self.temperature == 0,
        )
        return mixed_BK.argmax(dim=1)


def log_or_minus_inf(weight: float) -> float:
    """`log(weight)`, -inf for 0."""
    return math.log(weight) if weight > 0 else -math.inf


def tempered_log_probs(logits_BK: Tensor, temperature: float) -> Tensor:
    """`log softmax(logits / T)`; for T = 0 the log of the one-hot vector: 0 at the predicted class, -inf elsewhere."""
    if temperature > 0:
        return (logits_BK / temperature).log_softmax(dim=1)
    one_hot_BK = torch.full_like(logits_BK, -torch.inf)
    return one_hot_BK.scatter(1, logits_BK.argmax(dim=1, keepdim=True), 0.0)


def log_mixture(
    std_log_probs_BK: Tensor,
    rob_log_probs_BK: Tensor,
    *,
    alpha: float,
    one_minus_alpha: float,
    std_is_one_hot: bool,
) -> Tensor:
    """`log((1 - alpha) p_std + alpha p_rob)`, shape (B, K), finite for finite logits.

    Where alpha = 0 meets a one-hot std, whose other classes have probability 0, rob's classes count with weight 1e-300:
    finite, ordered, and far below anything that a float64 probability could show.
    """
    log_alpha = log_or_minus_inf(alpha)
    if std_is_one_hot:
        log_alpha = max(log_alpha, _LOG_FLOOR)
    std_part_BK = std_log_probs_BK + log_or_minus_inf(one_minus_alpha)
    return torch.logaddexp(std_part_BK, rob_log_probs_BK + log_alpha)


def log_surrogate(
    std_logits_BK: Tensor, rob_logits_BK: Tensor, mapped_logits_BK: Tensor, *, alpha_d: float, r_d: float
) -> Tensor:
    """f_aux = `log((1 - a_d) softmax(std) + a_d r_d softmax(rob) + a_d (1 - r_d) softmax(M(rob)))`, shape (B, K)."""
    weights = (1 - alpha_d, alpha_d * r_d, alpha_d * (1 - r_d))
    logits = (std_logits_BK, rob_logits_BK, mapped_logits_BK)
    parts = [
        z_BK.log_softmax(dim=1) + math.log(weight) for weight, z_BK in zip(weights, logits, strict=True) if weight > 0
    ]
    return torch.stack(parts).logsumexp(dim=0)

"""The mixed classifier `f_mix = log((1 - alpha) p_std + alpha p_M(rob))`, and a surrogate with useful gradients.

Shapes: B images, C H W channels and pixels, K classes. Mixing happens in float64; the result has the
dtype of the base classifiers' logits.
"""

import math

import torch
from torch import Tensor, nn

from .mixture import Mixture
from .transforms import LogitMap


class MixedClassifier(nn.Module):
    """Two base classifiers as one: accurate on clean images through `std`, robust through `rob`.

    Args:
        std: images (B, C, H, W) in [0, 1] to logits (B, K); only its probabilities at `temperature` are mixed.
        rob: the same for the robust classifier; its logits go through `transform`.
        transform: a `LogitTransform`, or another map of `transforms.py`.
        alpha: weight of `rob`, in [0, 1].
        one_minus_alpha: weight of `std`; by default `1 - alpha`, which loses digits in float64 if alpha is close to 1.
        temperature: divides the logits of `std`; 0 replaces its probabilities by the one-hot predicted class.
        surrogate_alpha: alpha_d, the weight of `rob` in the surrogate.
        rd: r_d, the share of that weight for the raw logits of `rob`; the rest is for the transformed ones.

    Both base classifiers are put into eval mode.

    Raises:
        InvalidInputError: if a weight is outside [0, 1], weights do not add up to 1, or the temperature is negative.
    """

    def __init__(
        self,
        std: nn.Module,
        rob: nn.Module,
        transform: LogitMap,
        alpha: float,
        *,
        one_minus_alpha: float = math.nan,
        temperature: float = 0.0,
        surrogate_alpha: float = 0.95,
        rd: float = 0.9,
    ) -> None:
        super().__init__()
        self.std, self.rob = std, rob
        self.mixture = Mixture(transform, alpha, one_minus_alpha, temperature, surrogate_alpha, rd)
        self.eval()

    @classmethod
    def from_mixture(cls, std: nn.Module, rob: nn.Module, mixture: Mixture) -> "MixedClassifier":
        """Return the mixed classifier of searched, stored or published parameters (`Choice.mixture`)."""
        return cls(std, rob, mixture.transform, **mixture.weights())

    @property
    def transform(self) -> LogitMap:
        """The map of the robust classifier's logits."""
        return self.mixture.transform

    @property
    def alpha(self) -> float:
        """The weight of the robust classifier."""
        return self.mixture.alpha

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return f_mix: logs of the mixed probabilities, (B, K), always finite."""
        return self.mix_logits(self.std(x_BCHW), self.rob(x_BCHW))

    def mix_logits(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """Return f_mix from the raw logits of the base classifiers."""
        return self.mixture.log_probs(std_logits_BK, rob_logits_BK).to(rob_logits_BK.dtype)

    def surrogate_of(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """Return f_aux from the raw logits of the base classifiers."""
        return self.mixture.log_surrogate_probs(std_logits_BK, rob_logits_BK).to(rob_logits_BK.dtype)

    def surrogate_logits(self, x_BCHW: Tensor) -> Tensor:
        """Return f_aux (paper, appendix B.2), (B, K): differentiable through `std`, `rob` and the transformation."""
        return self.surrogate_of(self.std(x_BCHW), self.rob(x_BCHW))

    def bypass(self, x_BCHW: Tensor) -> Tensor:
        """Return exactly the values of f_mix with the gradient of f_aux, for attacks that use a single output."""
        if not torch.is_grad_enabled():
            return self.forward(x_BCHW)
        std_logits_BK, rob_logits_BK = self.std(x_BCHW), self.rob(x_BCHW)
        with torch.no_grad():
            mixed_BK = self.mix_logits(std_logits_BK, rob_logits_BK)
        surrogate_BK = self.surrogate_of(std_logits_BK, rob_logits_BK)
        return mixed_BK + (surrogate_BK - surrogate_BK.detach())  # both are finite, so the difference is exactly 0

    def as_bypass(self) -> "BypassClassifier":
        """Return a module whose forward is `bypass`, for AutoAttack or RobustBench's `benchmark`."""
        return BypassClassifier(self)

    @torch.no_grad()
    def predict(self, x_BCHW: Tensor) -> Tensor:
        """Return the predicted classes, (B,)."""
        classes_B: Tensor = self(x_BCHW).argmax(dim=1)
        return classes_B

    def extra_repr(self) -> str:
        settings = {"transform": self.transform, **self.mixture.weights()}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class BypassClassifier(nn.Module):
    """A mixed classifier whose forward is `MixedClassifier.bypass`."""

    def __init__(self, mixed: MixedClassifier) -> None:
        super().__init__()
        self.mixed = mixed
        self.eval()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.mixed.bypass(x_BCHW)

"""The mixed classifier `f_mix = log((1 - alpha) p_std + alpha p_M(rob))` and its stand-ins for gradients.

Shapes: B images, C H W channels and pixels, K classes. Mixing happens in float64; logits come back in the base
classifiers' dtype.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .mixture import Mixture, log_or_minus_inf, log_surrogate
from .transforms import LogitMap

__all__ = ["BypassClassifier", "MixedClassifier", "Mixture", "StdUse"]

_LAZY_SLACK = 1e-6  # relative; above the rounding of float32 logits, so that lazy and full predictions agree


@dataclass(frozen=True)
class StdUse:
    """How often lazy predictions needed the standard classifier."""

    evaluated: int = 0
    skipped: int = 0

    @property
    def share_skipped(self) -> float:
        """Skipped evaluations of std per image, 0 before the first image."""
        total = self.evaluated + self.skipped
        return self.skipped / total if total else 0.0


class MixedClassifier(nn.Module):
    """Two base classifiers as one: accurate on clean images through `std`, robust through `rob`.

    Args:
        std: images (B, C, H, W) in [0, 1] to logits (B, K); only its probabilities at `temperature` enter the mixture.
        rob: the same for the robust classifier; its logits go through `transform`.
        transform: a `LogitTransform`, or another map of `transforms.py`.
        alpha: weight of rob, in [0, 1].
        one_minus_alpha: give it where `1 - alpha` in float64 would lose digits (`Selection` does).
        temperature: of std; 0 makes its vote one-hot.
        surrogate_alpha: alpha_d of the surrogate; `rd` its share of rob's raw logits.

    Both base classifiers are put into eval mode.

    Raises:
        InvalidInputError: for a weight outside [0, 1], weights that do not add up to 1, or a negative temperature.
    """

    report: Any = None  # of `mixednuts_dist.mix`: what it measured and predicted

    def __init__(
        self,
        std: nn.Module,
        rob: nn.Module,
        transform: LogitMap,
        alpha: float,
        *,
        one_minus_alpha: float | None = None,
        temperature: float = 0.0,
        surrogate_alpha: float = 0.95,
        rd: float = 0.9,
    ) -> None:
        super().__init__()
        self.std, self.rob, self.transform = std, rob, transform
        self.alpha, self.temperature = float(alpha), float(temperature)
        self.one_minus_alpha = 1.0 - self.alpha if one_minus_alpha is None else float(one_minus_alpha)
        self.surrogate_alpha, self.rd = float(surrogate_alpha), float(rd)
        _ = self.mixture  # raises where these values are no mixture
        self.std_use = StdUse()
        self.eval()

    @classmethod
    def from_mixture(cls, std: nn.Module, rob: nn.Module, mixture: Mixture) -> "MixedClassifier":
        """The mixed classifier of searched, stored or published parameters (`Choice.mixture`)."""
        return cls(std, rob, mixture.transform, **mixture.weights())

    @property
    def mixture(self) -> Mixture:
        """Everything beside the two base classifiers."""
        return Mixture(
            self.transform,
            self.alpha,
            self.one_minus_alpha,
            temperature=self.temperature,
            surrogate_alpha=self.surrogate_alpha,
            rd=self.rd,
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """f_mix: logs of the mixed probabilities, shape (B, K), always finite."""
        return self.mix_logits(self.std(x_BCHW), self.rob(x_BCHW))

    def mix_logits(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """f_mix from the base classifiers' raw logits."""
        return self.mixture.log_probs(std_logits_BK, rob_logits_BK).to(rob_logits_BK.dtype)

    def surrogate_logits(self, x_BCHW: Tensor) -> Tensor:
        """f_aux (paper, appendix B.2): differentiable through std, rob and the transformation; shape (B, K)."""
        return self.surrogate_of(self.std(x_BCHW), self.rob(x_BCHW))

    def forward_with_surrogate(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """f_aux with its gradient and f_mix without, from one pass of each base classifier."""
        std_logits_BK, rob_logits_BK = self.std(x_BCHW), self.rob(x_BCHW)
        with torch.no_grad():
            mixed_BK = self.mix_logits(std_logits_BK, rob_logits_BK)
        return self.surrogate_of(std_logits_BK, rob_logits_BK), mixed_BK

    def bypass(self, x_BCHW: Tensor) -> Tensor:
        """The value of f_mix, bit for bit, with the gradient of f_aux: one output for attacks that expect one."""
        if not torch.is_grad_enabled():
            return self.forward(x_BCHW)
        surrogate_BK, mixed_BK = self.forward_with_surrogate(x_BCHW)
        bypassed: Tensor = _StraightThrough.apply(surrogate_BK, mixed_BK)
        return bypassed

    def as_bypass(self) -> "BypassClassifier":
        """A module whose forward is `bypass`: hand this to AutoAttack or RobustBench's `benchmark`."""
        return BypassClassifier(self)

    @torch.no_grad()
    def predict(self, x_BCHW: Tensor) -> Tensor:
        """Predicted classes, shape (B,): those of `forward(x).argmax(1)`, with std asked only where it could matter.

        Rob decides alone where its class wins even against a std that is certain of any other class; `std_use` counts.
        """
        rob_logits_BK = self.rob(x_BCHW)
        decided_B, classes_B = self.decided_by_rob(rob_logits_BK)
        if not bool(decided_B.all()):
            open_B = ~decided_B
            mixed_BK = self.mix_logits(self.std(x_BCHW[open_B]), rob_logits_BK[open_B])
            classes_B[open_B] = mixed_BK.argmax(dim=1)
        n_skipped = int(decided_B.sum())
        self.std_use = StdUse(self.std_use.evaluated + len(decided_B) - n_skipped, self.std_use.skipped + n_skipped)
        return classes_B

    def decided_by_rob(self, rob_logits_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Where rob decides alone, shape (B,), and its classes after the transformation.

        That is where `log(alpha p_1) > log(1 - alpha + alpha p_2)` beyond rounding: std's whole vote, given to rob's
        second class, would not change the answer.
        """
        log_probs_BK = self.transform(rob_logits_BK.double()).log_softmax(dim=1)
        top_B2, classes_B2 = log_probs_BK.topk(2, dim=1)
        top_B2 = top_B2 + log_or_minus_inf(self.alpha)
        std_vote = top_B2.new_tensor(log_or_minus_inf(self.one_minus_alpha))
        rival_B = torch.logaddexp(std_vote, top_B2[:, 1])
        slack_B = _LAZY_SLACK * (1 + top_B2[:, 0].abs())
        return top_B2[:, 0] > rival_B + slack_B, classes_B2[:, 0].clone()

    def save_pretrained(self, folder: str | Path, *, std_uri: str | None = None, rob_uri: str | None = None) -> None:
        """Writes `mixed_classifier.json` and, for each base classifier without a URI, its weights as safetensors."""
        _deployment().save_pretrained(self, Path(folder), std_uri=std_uri, rob_uri=rob_uri)

    @classmethod
    def from_run(cls, uri: str, beta: float | None = None, *, trust_code: bool = False) -> "MixedClassifier":
        """The mixture that a run chose, on the CPU: both base classifiers and the parameters at `beta`.

        Args:
            uri: the run's folder, `<storage>/<run id>`: a path or any fsspec URI.
            beta: another of the searched ones than the deployed one.
            trust_code: run the Python code that the run names (`py:` classifiers, extensions) and ask its services,
                because you have read it.

        Raises:
            MissingArtifact: where there is no run, or its search has not been done.
            InvalidInputError: for a beta that was not searched (the valid ones are listed), a run without std, or
                another's run that names code, without `trust_code`.
            FingerprintMismatch: where a base classifier's weights are not those that the run was made with.
        """
        loaded: MixedClassifier = _deployment().load_run(uri, beta=beta, trust_code=trust_code)
        return loaded

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        std: nn.Module | None = None,
        rob: nn.Module | None = None,
        resolve: Callable[[str], nn.Module] | None = None,
        trust_code: bool = False,
    ) -> "MixedClassifier":
        """Reads what `save_pretrained` or `mixednuts export` wrote.

        Args:
            source: a folder, an fsspec URI of one, or `hf:ORG/NAME`.
            std, rob: modules to use instead of what the folder names; saved weights go into them.
            resolve: makes modules of URIs; `classifiers.load_classifier` by default.
            trust_code: run the Python files of `source` that build its base classifiers; read them first.

        Raises:
            InvalidInputError: where `source` holds no mixed classifier, or a base classifier's weights do not fit.
            BaseClassifierError: where a URI cannot be built here.
        """
        loaded: MixedClassifier = _deployment().load_pretrained(
            source, std=std, rob=rob, resolve=resolve, trust_code=trust_code
        )
        return loaded

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.mixture.weights().items())

    def surrogate_of(self, std_logits_BK: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """f_aux from the base classifiers' raw logits."""
        rob_float64_BK = rob_logits_BK.double()
        surrogate_BK = log_surrogate(
            std_logits_BK.double(),
            rob_float64_BK,
            self.transform(rob_float64_BK),
            alpha_d=self.surrogate_alpha,
            r_d=self.rd,
        )
        return surrogate_BK.to(rob_logits_BK.dtype)


class BypassClassifier(nn.Module):
    """A mixed classifier whose forward is `MixedClassifier.bypass`."""

    def __init__(self, mixed: MixedClassifier) -> None:
        super().__init__()
        self.mixed = mixed
        self.eval()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.mixed.bypass(x_BCHW)


class _StraightThrough(torch.autograd.Function):
    """The value of the second argument, the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, surrogate_BK: Tensor, mixed_BK: Tensor) -> Tensor:  # noqa: ARG004
        return mixed_BK.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad_outputs[0], None


def _deployment() -> Any:
    """The module that reads and writes files; it imports this one, so it is found by name when it is used."""
    return importlib.import_module("mixednuts_dist.deployment.loading")

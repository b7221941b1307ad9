"""The two criteria of Algorithm 1, each as what it measures at one bias.

Shapes: N images, K classes, P powers, S scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..mixing.transforms import Clamp, clamp_logits
from .screening import decisive_log_gaps
from .selection_kernel import Duels, Slab


@dataclass(frozen=True)
class Images:
    """LayerNormed logits in descending order.

    Every clamp first falls (GELU) or stays, then rises: over a row it is largest at the largest or the smallest logit.
    """

    descending_NK: Tensor

    def __len__(self) -> int:
        return len(self.descending_NK)

    def extremes(self, bias: float, clamp: Clamp) -> tuple[Tensor, Tensor]:
        """The clamped values of the largest and the smallest logit."""
        top_N, bottom_N = clamp_logits(self.descending_NK[:, [0, -1]] + bias, clamp).unbind(dim=1)
        return top_N, bottom_N

    def flipped(self, bias: float, clamp: Clamp) -> Tensor:
        """Where the smallest logit becomes the largest mapped one, whatever the scale and the power."""
        top_N, bottom_N = self.extremes(bias, clamp)
        return bottom_N > top_N

    def class_changes(self, bias: float, clamp: Clamp) -> int:
        """Images whose top class is another one after the transformation."""
        return int(self.flipped(bias, clamp).sum())

    def largest_inputs(self, biases: Sequence[float], clamp: Clamp) -> Tensor:
        """The largest clamped value in size at each bias, 0 without images; GELU's dip never decides."""
        if not len(self):
            return self.descending_NK.new_zeros(len(biases))
        ends_2 = torch.stack([self.descending_NK[:, 0], self.descending_NK[:, -1]]).flatten().aminmax()
        inputs_2b = torch.stack(ends_2)[:, None] + self.descending_NK.new_tensor(biases)
        return clamp_logits(inputs_2b, clamp).abs().amax(dim=0)


class Measurement(ABC):
    """What a slab of candidates yields: as much of each margin as cutoffs and counts depend on."""

    attacked_PSN: Tensor  # log(1 - margin) of the images that the constraint counts

    @abstractmethod
    def count(self, log_cutoffs_bPS: Tensor) -> Tensor:
        """Images that the objective counts at these values of log(1 - cutoff), shape (betas, P, S), int64."""


@dataclass(frozen=True)
class Criterion(ABC):
    """How candidates are measured and compared."""

    attacked: Images  # of the constraint
    clean: Images  # of the objective
    clamp: Clamp
    name: ClassVar[str]
    maximised: ClassVar[bool]

    @abstractmethod
    def measure(self, slab: Slab, kept: Sequence[int]) -> Measurement:
        """All that the choice among the candidates of `slab` depends on, for cutoffs that keep `kept` images."""

    def largest_inputs(self, biases: Sequence[float]) -> Tensor:
        """The largest |v| of any image at each bias: what decides whether a candidate overflows float32."""
        return torch.maximum(*(images.largest_inputs(biases, self.clamp) for images in (self.attacked, self.clean)))

    def class_changes(self, bias: float) -> int:
        """Images whose top class the transformation changes (violations of assumption 4.2)."""
        return sum(images.class_changes(bias, self.clamp) for images in (self.attacked, self.clean))

    def only_rob_right(self, bias: float) -> int | None:  # noqa: ARG002
        """Clean images that M(rob) gets right and std wrong (violations of assumption 4.1); None where unknown."""
        return None


@dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 to the letter: top-2 margins; the fewest clean-and-wrong images at or above the cutoff.

    `attacked` are the attacked images that rob gets right, `clean` the clean images that it gets wrong.
    """

    name: ClassVar[str] = "paper"
    maximised: ClassVar[bool] = False

    def measure(self, slab: Slab, kept: Sequence[int]) -> "PaperMeasurement":
        descending_NK = torch.cat([images.descending_NK for images in (self.attacked, self.clean)])
        flipped_N = torch.cat([images.flipped(slab.bias, slab.clamp) for images in (self.attacked, self.clean)])
        duels = Duels(descending_NK, flipped_N, torch.full_like(descending_NK[:, 0], torch.nan))
        n_attacked = len(self.attacked)
        gaps_PSN = decisive_log_gaps(duels, slab, n_attacked=n_attacked, kept=kept)
        return PaperMeasurement(gaps_PSN[..., :n_attacked], gaps_PSN[..., n_attacked:])


@dataclass(frozen=True)
class PaperMeasurement(Measurement):
    """log(1 - top-2 margin) of the attacked-and-correct and of the clean-and-wrong images."""

    attacked_PSN: Tensor
    wrong_PSN: Tensor

    def count(self, log_cutoffs_bPS: Tensor) -> Tensor:
        return torch.stack([(self.wrong_PSN <= cutoff_PS[..., None]).sum(dim=-1) for cutoff_PS in log_cutoffs_bPS])


@dataclass(frozen=True)
class ExactCriterion(Criterion):
    """Signed margins in the constraint; the most clean images that the T = 0 mixture gets right, in closed form.

    `attacked` are the attacked images that rob gets right, `clean` all clean images. The mixture's class is M(rob)'s
    top class t where `alpha (p_t - p_k) > 1 - alpha`, else std's class k.
    """

    clean_labels_N: Tensor
    top_N: Tensor  # rob's clean classes, and the classes that it finds least likely
    bottom_N: Tensor
    std_pred_N: Tensor
    std_logits_N: Tensor  # rob's LayerNormed clean logits of std's classes
    name: ClassVar[str] = "exact"
    maximised: ClassVar[bool] = True

    def measure(self, slab: Slab, kept: Sequence[int]) -> "ExactMeasurement":
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N  # both right or both wrong: no weight changes that
        attacked_NK = self.attacked.descending_NK
        duels = Duels(
            torch.cat([attacked_NK, self.clean.descending_NK[open_N]]),
            torch.cat([torch.zeros(len(attacked_NK), dtype=torch.bool, device=attacked_NK.device), flipped_N[open_N]]),
            torch.cat([torch.full_like(attacked_NK[:, 0], torch.nan), self.std_logits_N[open_N]]),
        )
        n_attacked = len(self.attacked)
        gaps_PSN = decisive_log_gaps(duels, slab, n_attacked=n_attacked, kept=kept)
        return ExactMeasurement(
            gaps_PSN[..., :n_attacked],
            gaps_PSN[..., n_attacked:],
            rob_right_N[open_N],
            int((rob_right_N & std_right_N).sum()),
        )

    def only_rob_right(self, bias: float) -> int | None:
        rob_right_N = self._rob_right(self.clean.flipped(bias, self.clamp))
        return int((rob_right_N & (self.std_pred_N != self.clean_labels_N)).sum())

    def _rob_right(self, flipped_N: Tensor) -> Tensor:
        return torch.where(flipped_N, self.bottom_N, self.top_N) == self.clean_labels_N


@dataclass(frozen=True)
class ExactMeasurement(Measurement):
    """What the closed form needs of the images that exactly one of M(rob) and std gets right."""

    attacked_PSN: Tensor
    open_PSN: Tensor  # log(1 - (p_t - p_k))
    rob_right_N: Tensor  # bool: M(rob) is the one that is right
    n_both_right: int

    def count(self, log_cutoffs_bPS: Tensor) -> Tensor:
        counts = [
            ((self.open_PSN < cutoff_PS[..., None]) == self.rob_right_N).sum(dim=-1) for cutoff_PS in log_cutoffs_bPS
        ]
        return torch.stack(counts) + self.n_both_right

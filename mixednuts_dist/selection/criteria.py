"""The criteria of Algorithm 1: which candidate is best, from what the attacked and the clean images' margins are.

A criterion is a class that registers itself. It reads the rows of a run (`from_rows`) and scores the candidates of a
slab (`score`): the cutoff of each, the count of its objective there, and how many images it keeps.

Shapes: B images of the run, N rows of logits, K classes, P powers, S scales, b betas.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, clamp_logits, clamp_shape
from ..mixing.margins import class_indices
from ..register import CRITERIA
from .inputs import CachedLogits, normed_logits
from .kernel import Duels, Slab, sort_rows
from .screening import decisive_log_gaps


class Scores(NamedTuple):
    """What is known of every candidate at every beta, three tensors of one shape."""

    log_cutoffs: Tensor  # float64, log(1 - cutoff)
    counts: Tensor  # int64, of the objective
    kept: Tensor  # int64, images of the constraint that reach the cutoff


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
        """The largest |v| at each bias: at an end of the range or where the clamp turns; 0 without images."""
        if not len(self):
            return self.descending_NK.new_zeros(len(biases))
        ends_2 = torch.stack([self.descending_NK[:, 0], self.descending_NK[:, -1]]).flatten().aminmax()
        inputs_2b = torch.stack(ends_2)[:, None] + self.descending_NK.new_tensor(biases)
        lowest = clamp_shape(clamp).lowest
        return clamp_logits(inputs_2b, clamp).abs().amax(dim=0).clamp_min(abs(lowest) if math.isfinite(lowest) else 0.0)


class Criterion(ABC):
    """How candidates are measured and compared.

    A subclass registers itself with `CRITERIA(name, describes=...)` and says whether its objective is maximised.
    """

    name: ClassVar[str]
    maximised: ClassVar[bool]
    inequality: ClassVar[bool] = False  # whether `score` looks for the best cutoff that keeps at least beta
    attacked: Images  # of the constraint
    clean: Images  # of the objective
    clamp: Clamp

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        """The criterion on the rows of a run; what it does not count it leaves out here."""

    @abstractmethod
    def score(self, slab: Slab, kept: Sequence[int]) -> Scores:
        """The candidates of `slab` where at least so many images must be kept, one number a beta; shape (b, P, S)."""

    @property
    def n_attacked(self) -> int:
        """Images of the constraint."""
        return len(self.attacked)

    def largest_inputs(self, biases: Sequence[float]) -> Tensor:
        """The largest |v| of any image at each bias: what decides whether a candidate overflows float32."""
        return torch.maximum(*(images.largest_inputs(biases, self.clamp) for images in (self.attacked, self.clean)))

    def class_changes(self, bias: float) -> int:
        """Images whose top class the transformation changes (violations of assumption 4.2)."""
        return sum(images.class_changes(bias, self.clamp) for images in (self.attacked, self.clean))

    def only_rob_right(self, bias: float) -> int | None:  # noqa: ARG002
        """Clean images that M(rob) gets right and std wrong (violations of assumption 4.1); None where unknown."""
        return None


@CRITERIA(
    "paper", describes="Algorithm 1 to the letter: the fewest clean-and-wrong images at or above the cutoff", order=2
)
@dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 to the letter: top-2 margins; the fewest clean-and-wrong images at or above the cutoff.

    `attacked` are the attacked images that rob gets right, `clean` the clean images that it gets wrong.
    """

    attacked: Images
    clean: Images
    clamp: Clamp
    name: ClassVar[str] = "paper"
    maximised: ClassVar[bool] = False

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        """Rob's classes are those of its float32 logits; LayerNorm does not change them."""
        survived_B = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
        wrong_B = rows.rob_clean_BK.argmax(dim=1) != rows.labels_B
        return cls.of(rows.rob_attacked_BK[survived_B], rows.rob_clean_BK[wrong_B], clamp=clamp, ln_k=ln_k)

    @classmethod
    def of(
        cls,
        attacked_correct_BK: Tensor,
        clean_wrong_BK: Tensor,
        *,
        clamp: Clamp,
        ln_k: int | None,
        std_correct_B: Tensor | None = None,
    ) -> Self:
        """The checked inputs of `select_parameters`."""
        _, attacked_BK = normed_logits("attacked_correct_BK", attacked_correct_BK, clamp=clamp, ln_k=ln_k)
        require_attacked(len(attacked_BK))
        _, wrong_BK = normed_logits("clean_wrong_BK", clean_wrong_BK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
        if std_correct_B is not None:
            wrong_BK = wrong_BK[_mask("std_correct_B", std_correct_B, wrong_BK)]
        return cls(Images(attacked_BK), Images(wrong_BK), clamp)

    def score(self, slab: Slab, kept: Sequence[int]) -> Scores:
        descending_NK = torch.cat([images.descending_NK for images in (self.attacked, self.clean)])
        flipped_N = torch.cat([images.flipped(slab.bias, slab.clamp) for images in (self.attacked, self.clean)])
        duels = Duels(descending_NK, flipped_N, torch.full_like(descending_NK[:, 0], torch.nan))
        gaps_PSN = decisive_log_gaps(duels, slab, n_attacked=len(self.attacked), kept=kept)
        attacked_PSN, wrong_PSN = gaps_PSN.tensor_split([len(self.attacked)], dim=-1)
        cutoffs_bPS = order_statistics(attacked_PSN, kept)
        return Scores(cutoffs_bPS, *(_reached(gaps, cutoffs_bPS) for gaps in (wrong_PSN, attacked_PSN)))


@CRITERIA(
    "exact", describes="signed margins; the most clean images that the mixture gets right, in closed form", order=1
)
@dataclass(frozen=True)
class ExactCriterion(Criterion):
    """Signed margins in the constraint; the most clean images that the T = 0 mixture gets right, in closed form.

    `attacked` are the attacked images that rob gets right, `clean` all clean images. The mixture's class is M(rob)'s
    top class t where `alpha (p_t - p_k) > 1 - alpha`, else std's class k.
    """

    attacked: Images
    clean: Images
    clamp: Clamp
    clean_labels_N: Tensor
    top_N: Tensor  # rob's clean classes, and the classes that it finds least likely
    bottom_N: Tensor
    std_pred_N: Tensor
    std_logits_N: Tensor  # rob's LayerNormed clean logits of std's classes
    name: ClassVar[str] = "exact"
    maximised: ClassVar[bool] = True

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        return cls.of(
            rows.rob_attacked_BK, rows.labels_B, rows.rob_clean_BK, rows.labels_B, rows.std_pred_B,
            clamp=clamp, ln_k=ln_k,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        attacked_BK: Tensor,
        attacked_labels_B: Tensor,
        clean_BK: Tensor,
        clean_labels_B: Tensor,
        std_pred_B: Tensor,
        *,
        clamp: Clamp,
        ln_k: int | None,
    ) -> Self:
        """The checked inputs of `select_parameters_exact`."""
        normed_BK, descending_BK = normed_logits("attacked_BK", attacked_BK, clamp=clamp, ln_k=ln_k)
        clean_BK, clean_descending_BK = normed_logits("clean_BK", clean_BK, clamp=clamp, ln_k=ln_k, like=normed_BK)
        if not len(clean_BK):
            raise InvalidInputError("clean_BK has no image: the exact criterion needs clean images to count")
        labels_B = class_indices("attacked_labels_B", attacked_labels_B, normed_BK)
        right_B = normed_BK.argmax(dim=1) == labels_B
        require_attacked(int(right_B.sum()))
        std_pred_B = class_indices("std_pred_B", std_pred_B, clean_BK)
        return cls(
            Images(descending_BK[right_B]),
            Images(clean_descending_BK),
            clamp,
            clean_labels_N=class_indices("clean_labels_B", clean_labels_B, clean_BK),
            top_N=clean_BK.argmax(dim=1),
            bottom_N=clean_BK.argmin(dim=1),
            std_pred_N=std_pred_B,
            std_logits_N=clean_BK.gather(1, std_pred_B[:, None]).squeeze(1),
        )

    def score(self, slab: Slab, kept: Sequence[int]) -> Scores:
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N  # both right or both wrong: no weight changes that
        attacked_NK = self.attacked.descending_NK
        duels = Duels(
            torch.cat([attacked_NK, self.clean.descending_NK[open_N]]),
            torch.cat([torch.zeros(len(attacked_NK), dtype=torch.bool, device=attacked_NK.device), flipped_N[open_N]]),
            torch.cat([torch.full_like(attacked_NK[:, 0], torch.nan), self.std_logits_N[open_N]]),
        )
        gaps_PSN = decisive_log_gaps(duels, slab, n_attacked=len(self.attacked), kept=kept)
        attacked_PSN, open_PSN = gaps_PSN.tensor_split([len(self.attacked)], dim=-1)
        cutoffs_bPS = order_statistics(attacked_PSN, kept)
        counts = [((open_PSN < cutoff_PS[..., None]) == rob_right_N[open_N]).sum(dim=-1) for cutoff_PS in cutoffs_bPS]
        n_both_right = int((rob_right_N & std_right_N).sum())
        return Scores(cutoffs_bPS, torch.stack(counts) + n_both_right, _reached(attacked_PSN, cutoffs_bPS))

    def only_rob_right(self, bias: float) -> int | None:
        rob_right_N = self._rob_right(self.clean.flipped(bias, self.clamp))
        return int((rob_right_N & (self.std_pred_N != self.clean_labels_N)).sum())

    def _rob_right(self, flipped_N: Tensor) -> Tensor:
        return torch.where(flipped_N, self.bottom_N, self.top_N) == self.clean_labels_N


def order_statistics(log_gaps_PSN: Tensor, kept: Sequence[int]) -> Tensor:
    """The largest log(1 - margin) of so many images with the largest margins, shape (b, P, S)."""
    return sort_rows(log_gaps_PSN)[..., [k - 1 for k in kept]].movedim(-1, 0)


def _reached(log_gaps_PSN: Tensor, cutoffs_bPS: Tensor) -> Tensor:
    """How many images have a margin of at least the cutoff, int64, shape (b, P, S)."""
    return torch.stack([(log_gaps_PSN <= cutoff_PS[..., None]).sum(dim=-1) for cutoff_PS in cutoffs_bPS])


def require_attacked(n_images: int) -> None:
    """Raises InvalidInputError where no attacked image is left to set a cutoff from."""
    if n_images == 0:
        raise InvalidInputError(
            "no attacked image is classified correctly by rob: there is no margin to set the cutoff from"
        )


def _mask(name: str, mask_B: Tensor, logits_BK: Tensor) -> Tensor:
    if mask_B.shape != (len(logits_BK),):
        raise InvalidInputError(f"{name} has shape {tuple(mask_B.shape)}, expected ({len(logits_BK)},)")
    return mask_B.to(device=logits_BK.device, dtype=torch.bool)

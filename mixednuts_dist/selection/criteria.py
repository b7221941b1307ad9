"""The criteria of Algorithm 1: they score each candidate from the margins of the attacked and of the clean images.

A criterion is a registered class. It is made from the rows of a run (`from_rows`) and scores the candidates of a slab
(`score`): the margin threshold of each, the objective's count there, and the number of images that it keeps.

Shapes: B images of the run, N rows of logits, M adversarial examples of n images, E clean rows that are counted, K
classes, P powers, S scales, b betas.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config.register import CRITERIA
from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, clamp_logits, clamp_shape
from ..mixing.margins import class_indices
from .grid import kept_images
from .inputs import AttackedPoints, CachedLogits, normed_logits
from .kernel import GapRows, Slab, log_one_minus_gaps, sort_rows


class Scores(NamedTuple):
    """The scores of every candidate at every beta: three tensors of the same shape."""

    log_cutoffs: Tensor  # float64, log(1 - margin threshold)
    counts: Tensor  # int64, images that the objective counts
    kept: Tensor  # int64, images of the constraint with a margin at or above the threshold


@dataclass(frozen=True)
class Images:
    """LayerNormed logits, each row in descending order.

    Each clamp rises, or falls then rises, so its maximum over a row is at the largest or at the smallest logit.
    """

    descending_NK: Tensor

    def __len__(self) -> int:
        return len(self.descending_NK)

    def flipped(self, bias: float, clamp: Clamp) -> Tensor:
        """Return the rows whose smallest logit the clamp maps above the largest, for every scale and power."""
        top_N, bottom_N = clamp_logits(self.descending_NK[:, [0, -1]] + bias, clamp).unbind(dim=1)
        return bottom_N > top_N

    def top_ranks(self, bias: float, clamp: Clamp) -> Tensor:
        """Return the rank, in the row, of the class of the largest mapped logit: the first or the last."""
        return self.flipped(bias, clamp).long() * (self.descending_NK.shape[1] - 1)

    def largest_inputs(self, biases: Sequence[float], clamp: Clamp) -> Tensor:
        """Return the largest |v| at each bias: at an end of the range or where the clamp turns; 0 without images."""
        if not len(self):
            return self.descending_NK.new_zeros(len(biases))
        ends_2 = torch.stack([self.descending_NK[:, 0], self.descending_NK[:, -1]]).flatten().aminmax()
        inputs_2b = torch.stack(ends_2)[:, None] + self.descending_NK.new_tensor(biases)
        lowest = clamp_shape(clamp).lowest
        return clamp_logits(inputs_2b, clamp).abs().amax(dim=0).clamp_min(abs(lowest) if math.isfinite(lowest) else 0.0)


@dataclass(frozen=True)
class Attacked(Images):
    """The adversarial examples of the constraint's images, one per row.

    The first n rows are those of the minimum-margin attack, one per image in the order of the images.
    """

    image_M: Tensor  # int64: the image of each row
    n_images: int
    label_ranks_M: Tensor  # int64: the rank of the label's logit in the row, 0 if the robust classifier is correct
    rivals_M: Tensor  # float64: the logit that the margin is taken to; NaN: that of the best class but the label

    @classmethod
    def of(
        cls, descending_nK: Tensor, points: AttackedPoints | None, labels_n: Tensor | None = None, *, clamp: Clamp,
        ln_k: int | None,
    ) -> Self:  # fmt: skip
        """Return one example per image, on which the robust classifier is correct, then the further `points`.

        Args:
            labels_n: if given, the margins at `points` are signed; otherwise they are those of the largest logit.
        """
        ranks_n = torch.zeros(len(descending_nK), dtype=torch.int64, device=descending_nK.device)
        rivals_n = torch.full_like(descending_nK[:, 0], torch.nan)
        first = cls(descending_nK, torch.arange(len(ranks_n), device=ranks_n.device), len(ranks_n), ranks_n, rivals_n)
        if points is None:
            return first
        logits_PK, image_P = points.rob_logits_PK, points.checked_rows(ranks_n)
        normed_PK, descending_PK = normed_logits("points", logits_PK, clamp=clamp, ln_k=ln_k, like=descending_nK)
        ranks_P, rivals_P = torch.zeros_like(image_P), torch.full_like(normed_PK[:, 0], torch.nan)
        if labels_n is not None:
            label_P1 = labels_n[image_P][:, None]
            ranks_P = (normed_PK > normed_PK.gather(1, label_P1)).sum(dim=1)
            if points.std_pred_P is not None:  # the rival of a correct image is the class of `std`
                std_P1 = class_indices("points.std_pred_P", points.std_pred_P, normed_PK)[:, None]
                leads_P = (ranks_P == 0) & (std_P1 != label_P1).squeeze(1)
                rivals_P = torch.where(leads_P, normed_PK.gather(1, std_P1).squeeze(1), rivals_P)
        return replace(
            first,
            descending_NK=torch.cat([descending_nK, descending_PK]),
            image_M=torch.cat([first.image_M, image_P]),
            label_ranks_M=torch.cat([ranks_n, ranks_P]),
            rivals_M=torch.cat([rivals_n, rivals_P]),
        )

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each image's values, last axis M -> n."""
        first, further = values[..., : self.n_images], values[..., self.n_images :]
        if not further.shape[-1]:
            return first
        return first.scatter_reduce(-1, self.image_M[self.n_images :].expand_as(further), further, "amax")

    def n_right(self) -> int:
        """Count the images that are correct at every example, the most that a mixed classifier can keep."""
        return self.n_images - len(set(self.image_M[self.label_ranks_M > 0].tolist()))

    def first(self) -> Images:
        """Return the examples of the minimum-margin attack."""
        return Images(self.descending_NK[: self.n_images])


@dataclass(frozen=True)
class Criterion(ABC):
    """How candidates are scored and compared.

    A subclass registers itself with `CRITERIA(name, describes=...)`. Decisions depend on the attributes below, never on
    the name.
    """

    name: ClassVar[str]
    maximized: ClassVar[bool]  # whether the objective is maximized
    meaning: ClassVar[str] = "objective"  # the label of the objective's axis, a share of images
    # True: `score` takes the best threshold among those that keep at least a share beta. False: it takes the one that
    # keeps just beta. Refinement rounds need True.
    inequality: ClassVar[bool] = False

    attacked: Attacked  # the constraint's images
    clean: Images  # the objective's images
    clamp: Clamp

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        """Return the criterion on the rows of a run, without those that it does not count."""

    @abstractmethod
    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        """Return the scores of the slab's candidates, (b, P, S); `kept` has the least images to keep at each beta."""

    @property
    def n_attacked(self) -> int:
        """Images of the constraint."""
        return self.attacked.n_images

    def required(self, beta: float) -> float:
        """Return how many of these images `beta` asks for, which `score` takes as one of `kept`."""
        return kept_images(beta, self.n_attacked)

    def largest_inputs(self, biases: Sequence[float]) -> Tensor:
        """Return the largest |v| at each bias, over all images; `s |v|^p` must not overflow float32 there."""
        return torch.maximum(*(images.largest_inputs(biases, self.clamp) for images in (self.attacked, self.clean)))

    def class_changes(self, bias: float) -> int:
        """Count the images whose top class the transformation changes (violations of assumption 4.2)."""
        return sum(int(images.flipped(bias, self.clamp).sum()) for images in (self.attacked.first(), self.clean))

    def only_rob_right(self, bias: float) -> int | None:  # noqa: ARG002
        """Count the clean images on which only M(rob) is correct (violations of assumption 4.1); None if unknown."""
        return None

    def _log_gaps(self, rows: GapRows, slab: Slab) -> tuple[Tensor, Tensor]:
        """Return log(1 - gap) of the attacked images, largest over their examples, (P, S, n), and of the other rows."""
        gaps_PSN, n_points = log_one_minus_gaps(rows, slab), len(self.attacked)
        return self.attacked.largest(gaps_PSN[..., :n_points]), gaps_PSN[..., n_points:]


@CRITERIA(
    "paper",
    describes="Algorithm 1 to the letter: the fewest clean-and-wrong images at or above the margin threshold",
    order=2,
)
@dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 to the letter: top-2 margins; the fewest clean-and-wrong images at or above the threshold.

    The robust classifier is correct on the images `attacked` under attack, and wrong on the images `clean`.
    """

    name: ClassVar[str] = "paper"
    maximized: ClassVar[bool] = False
    meaning: ClassVar[str] = "clean and wrong images above the margin threshold"

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        survived_B = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
        wrong_B = rows.rob_clean_BK.argmax(dim=1) != rows.labels_B
        points = None if rows.points is None else rows.points.of_images(survived_B)
        return cls.of(
            rows.rob_attacked_BK[survived_B], rows.rob_clean_BK[wrong_B], clamp=clamp, ln_k=ln_k, points=points
        )

    @classmethod
    def of(
        cls,
        attacked_correct_BK: Tensor,
        clean_wrong_BK: Tensor,
        *,
        clamp: Clamp,
        ln_k: int | None,
        std_correct_B: Tensor | None = None,
        points: AttackedPoints | None = None,
    ) -> Self:
        """Check the inputs of `select_parameters`."""
        _, attacked_BK = normed_logits("attacked_correct_BK", attacked_correct_BK, clamp=clamp, ln_k=ln_k)
        require_attacked(len(attacked_BK))
        _, wrong_BK = normed_logits("clean_wrong_BK", clean_wrong_BK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
        if std_correct_B is not None:
            wrong_BK = wrong_BK[_mask("std_correct_B", std_correct_B, wrong_BK)]
        attacked = Attacked.of(attacked_BK, points, clamp=clamp, ln_k=ln_k)
        return cls(attacked, Images(wrong_BK), clamp)

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        attacked_NK, wrong_NK = self.attacked.descending_NK, self.clean.descending_NK
        gap_rows = GapRows(
            torch.cat([attacked_NK, wrong_NK]),
            torch.cat([images.top_ranks(slab.bias, slab.clamp) for images in (self.attacked, self.clean)]),
            attacked_NK.new_full((len(attacked_NK) + len(wrong_NK),), torch.nan),
        )
        attacked_PSn, wrong_PSE = self._log_gaps(gap_rows, slab)
        cutoffs_bPS = self.thresholds(sort_rows(attacked_PSn), kept)
        counts, n_kept = (
            torch.stack([(gaps <= cutoff_PS[..., None]).sum(dim=-1) for cutoff_PS in cutoffs_bPS])
            for gaps in (wrong_PSE, attacked_PSn)
        )
        return Scores(cutoffs_bPS, counts, n_kept)

    def thresholds(self, log1m_margins_PSn: Tensor, kept: Sequence[float]) -> Tensor:
        """Return log(1 - threshold) for each number of images to keep, (b, P, S), from sorted values."""
        return log1m_margins_PSn[..., [int(k) - 1 for k in kept]].movedim(-1, 0)


@CRITERIA(
    "paper-interpolated", describes="Algorithm 1 with the interpolated quantile of the paper's reference code", order=3
)
@dataclass(frozen=True)
class InterpolatedPaperCriterion(PaperCriterion):
    """Algorithm 1 with `numpy.percentile`'s linear interpolation, as the reference code computes the threshold.

    The threshold lies between two margins, so it keeps one image fewer than `beta` asks for unless the quantile falls
    on a margin. `paper` uses the order statistic that satisfies the constraint on the data.
    """

    name: ClassVar[str] = "paper-interpolated"

    def required(self, beta: float) -> float:
        """Return the rank of the quantile among the descending margins, from 1; fractional between two of them."""
        return 1 + beta * (self.n_attacked - 1)

    def thresholds(self, log1m_margins_PSn: Tensor, kept: Sequence[float]) -> Tensor:
        """Interpolate the margins linearly between the two ranks next to each number."""
        last = log1m_margins_PSn.shape[-1] - 1
        found = []
        for rank in kept:
            low, weight = int(rank) - 1, rank % 1
            above, below = log1m_margins_PSn[..., low], log1m_margins_PSn[..., min(low + 1, last)]
            found.append(torch.logaddexp(above + math.log1p(-weight), below + math.log(weight)) if weight else above)
        return torch.stack(found)


@CRITERIA("exact", describes="signed margins; the most correct clean images, in closed form", order=1)
@dataclass(frozen=True)
class ExactCriterion(Criterion):
    """Signed margins in the constraint; the most correct clean images at T = 0, in closed form.

    `attacked` are the images on which the robust classifier is robust, `clean` all clean images. The mixed class is the
    top class t of M(rob) if `alpha (p_t - p_k) > 1 - alpha`, and otherwise the class k of the standard classifier. So a
    clean image on which exactly one of them is correct changes once as the threshold falls: when it passes the gap
    `p_t - p_k`. The count is a step function of the threshold; `best_thresholds` maximizes it.
    """

    clean_labels_N: Tensor
    top_N: Tensor  # the clean classes of the robust classifier, and those that it finds least likely
    bottom_N: Tensor
    std_pred_N: Tensor
    std_logits_N: Tensor  # the LayerNormed clean logits of `rob` at the classes of `std`
    name: ClassVar[str] = "exact"
    maximized: ClassVar[bool] = True
    meaning: ClassVar[str] = "clean accuracy of the mixed classifier"
    inequality: ClassVar[bool] = True

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        return cls.of(
            rows.rob_attacked_BK, rows.labels_B, rows.rob_clean_BK, rows.labels_B, rows.std_pred_B,
            clamp=clamp, ln_k=ln_k, points=rows.points,
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
        points: AttackedPoints | None = None,
    ) -> Self:
        """Check the inputs of `select_parameters_exact`."""
        normed_BK, descending_BK = normed_logits("attacked_BK", attacked_BK, clamp=clamp, ln_k=ln_k)
        clean_BK, clean_descending_BK = normed_logits("clean_BK", clean_BK, clamp=clamp, ln_k=ln_k, like=normed_BK)
        if not len(clean_BK):
            raise InvalidInputError("clean_BK has no image: the exact criterion needs clean images to count")
        labels_B = class_indices("attacked_labels_B", attacked_labels_B, normed_BK)
        right_B = normed_BK.argmax(dim=1) == labels_B
        require_attacked(int(right_B.sum()))
        points = None if points is None else points.of_images(right_B)
        attacked = Attacked.of(descending_BK[right_B], points, labels_B[right_B], clamp=clamp, ln_k=ln_k)
        std_pred_B = class_indices("std_pred_B", std_pred_B, clean_BK)
        return cls(
            attacked,
            Images(clean_descending_BK),
            clamp,
            clean_labels_N=class_indices("clean_labels_B", clean_labels_B, clean_BK),
            top_N=clean_BK.argmax(dim=1),
            bottom_N=clean_BK.argmin(dim=1),
            std_pred_N=std_pred_B,
            std_logits_N=clean_BK.gather(1, std_pred_B[:, None]).squeeze(1),
        )

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        gap_rows, rob_right_E = self._gap_rows(slab)
        attacked_PSn, open_PSE = self._log_gaps(gap_rows, slab)
        log_cutoffs, gained, n_kept = best_thresholds(attacked_PSn, open_PSE, rob_right_E, kept)
        n_std_right = int((self.std_pred_N == self.clean_labels_N).sum())  # the count if `std` decides all images
        return Scores(log_cutoffs, gained + n_std_right, n_kept)

    def _gap_rows(self, slab: Slab) -> tuple[GapRows, Tensor]:
        """Return the rows to measure, and on which of the clean ones M(rob) is the correct one of the classifiers."""
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N  # if both are right or both are wrong, no weight changes that
        # If the clamp changes the top class, the margin is the signed one, which holds for any class of `std`.
        rivals_M = self.attacked.rivals_M.masked_fill(self.attacked.flipped(slab.bias, slab.clamp), torch.nan)
        gap_rows = GapRows(
            torch.cat([self.attacked.descending_NK, self.clean.descending_NK[open_N]]),
            torch.cat([self.attacked.label_ranks_M, self.clean.top_ranks(slab.bias, slab.clamp)[open_N]]),
            torch.cat([rivals_M, self.std_logits_N[open_N]]),
        )
        return gap_rows, rob_right_N[open_N]

    def only_rob_right(self, bias: float) -> int | None:
        rob_right_N = self._rob_right(self.clean.flipped(bias, self.clamp))
        return int((rob_right_N & (self.std_pred_N != self.clean_labels_N)).sum())

    def _rob_right(self, flipped_N: Tensor) -> Tensor:
        return torch.where(flipped_N, self.bottom_N, self.top_N) == self.clean_labels_N


def best_thresholds(
    attacked_PSn: Tensor, open_PSE: Tensor, rob_right_E: Tensor, kept: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best threshold of every candidate that keeps enough images: log, gain and images kept, (b, P, S).

    With L = log(1 - threshold), the robust classifier decides the clean rows with a value below L, and an attacked
    image is kept if its value is at most L. Let `v_1 <= ... <= v_E` be the values of the clean rows. If L is in the
    interval j, `(v_j, v_{j+1}]`, the robust classifier decides the first j rows: it gains an image for each row on
    which it is right, and loses one for each other row. L is at least the order statistic that keeps enough, and at
    most 0. The best L has the largest gain; among equals it keeps the most images, and then it is the smallest.

    Args:
        attacked_PSn: log(1 - margin) of the attacked images.
        open_PSE: log(1 - gap) of the clean rows on which exactly one of the two classifiers is right.
        rob_right_E: on which of these rows the robust classifier is right.
        kept: the least images to keep, one number per beta.
    """
    values, order = open_PSE.clamp(max=0.0).sort(dim=-1)
    gains = pad(torch.where(rob_right_E, 1, -1)[order].cumsum(dim=-1), (1, 0))  # in interval 0, 1, ... E
    attacked = sort_rows(attacked_PSn)
    found = [_best_threshold(attacked, values, gains, int(n_needed)) for n_needed in kept]
    log_cutoffs, gained, n_kept = map(torch.stack, zip(*found, strict=True))
    return log_cutoffs, gained, n_kept


def _best_threshold(attacked: Tensor, values: Tensor, gains: Tensor, n_needed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best threshold of each candidate for one beta, from sorted values; see `best_thresholds`."""
    starts, ends = pad(values, (1, 0), value=-torch.inf), pad(values, (0, 1))  # the ends of the intervals
    interval = torch.arange(ends.shape[-1], device=gains.device)
    least = attacked[..., n_needed - 1, None].contiguous()  # the smallest L that keeps enough
    lowest = torch.searchsorted(values, least)  # its interval
    allowed = (interval == lowest) | ((interval > lowest) & (starts < ends))
    most = gains.masked_fill(~allowed, torch.iinfo(gains.dtype).min).amax(dim=-1, keepdim=True)
    best = allowed & (gains == most)

    # The end of the last interval with the largest gain keeps the most images.
    last_end = ends.gather(-1, (best * interval).amax(dim=-1, keepdim=True))
    feasible = least <= 0
    n_kept = torch.searchsorted(attacked, torch.where(feasible, last_end, least), right=True)

    # The smallest L that keeps as many is the value of an attacked image, unless the gain is lower there. Then no value
    # of an attacked image lies in the next interval with this gain, and L is put into its middle.
    smallest = attacked.gather(-1, (n_kept - 1).clamp_min(0))
    at = torch.searchsorted(values, smallest)
    later = (best & (interval > at)).int().argmax(dim=-1, keepdim=True)
    middle = (starts.gather(-1, later) + ends.gather(-1, later)) / 2
    log_cutoffs = torch.where((gains.gather(-1, at) == most) | ~feasible, smallest, middle)
    return log_cutoffs.squeeze(-1), most.squeeze(-1), n_kept.squeeze(-1)


def require_attacked(n_images: int) -> None:
    """Raise InvalidInputError if no attacked image can set a margin threshold."""
    if n_images == 0:
        raise InvalidInputError(
            "no attacked image is classified correctly by `rob`: no margin can set the threshold. Is `rob` the "
            "robust one (`std` comes first), and is eps, in units of the pixel range, one that it was trained for?"
        )


def _mask(name: str, mask_B: Tensor, logits_BK: Tensor) -> Tensor:
    if mask_B.shape != (len(logits_BK),):
        raise InvalidInputError(f"{name} has shape {tuple(mask_B.shape)}, expected ({len(logits_BK)},)")
    return mask_B.to(device=logits_BK.device, dtype=torch.bool)

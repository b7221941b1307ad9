"""The criteria of Algorithm 1: they score each candidate from the margins of the attacked and of the clean images.

A criterion is a registered class. It is made from the rows of a run (`from_rows`). `score` returns three numbers for
each candidate of a slab (one bias with some powers and scales): the margin threshold, the count of the objective at
this threshold, and the number of attacked images that the candidate keeps robust. The attacked images form the
constraint, and the clean images form the objective.

Shapes: B images of the run, N rows of logits, M adversarial examples of n images, E clean rows that are counted, K
classes, P powers, S scales, b betas.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config.register import CRITERIA
from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, clamp_logits, size_at_turn
from ..mixing.margins import class_indices, require_logits
from .grid import kept_images
from .inputs import AttackedPoints, CachedLogits, normed_logits
from .kernel import LeadRows, Slab, log_one_minus_leads, sort_rows


class Scores(NamedTuple):
    """The scores of every candidate at every beta: three tensors of the same shape."""

    log_thresholds: Tensor  # float64, log(1 - margin threshold)
    counts: Tensor  # int64, images that the objective counts
    kept: Tensor  # int64, images of the constraint with a margin at or above the threshold


@dataclass(frozen=True)
class Attacked:
    """The adversarial examples of the constraint's images, one per row.

    The first n rows are those of MMAA, one per image in the order of the images. The robust classifier is correct on
    them.
    """

    descending_MK: Tensor  # LayerNormed logits, each row in descending order
    n_images: int
    image_M: Tensor  # int64: the image of each row
    label_ranks_M: Tensor  # int64: the rank of the label's logit in the row, 0 if the robust classifier is correct
    rivals_M: Tensor  # float64: the logit to which the margin is computed; NaN for the largest one except the label's

    @classmethod
    def of(cls, name: str, examples: AttackedPoints, labels_n: Tensor, *, clamp: Clamp, ln_k: int | None) -> "Attacked":
        """LayerNorm and sort the logits of the examples; errors of `normed_logits` call them `name`."""
        normed_MK, descending_MK = normed_logits(name, examples.rob_logits_PK, clamp=clamp, ln_k=ln_k)
        label_M1, std_M1 = labels_n[examples.image_P][:, None], examples.std_pred_P[:, None]
        ranks_M = (normed_MK > normed_MK.gather(1, label_M1)).sum(dim=1)
        any_std_M = (ranks_M > 0) | (std_M1 == label_M1).squeeze(1)
        rivals_M = normed_MK.gather(1, std_M1).squeeze(1).masked_fill(any_std_M, torch.nan)
        return cls(descending_MK, len(labels_n), examples.image_P, ranks_M, rivals_M)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each image's values, last axis M -> n."""
        first, further = values[..., : self.n_images], values[..., self.n_images :]
        return first.scatter_reduce(-1, self.image_M[self.n_images :].expand_as(further), further, "amax")

    def n_right(self) -> int:
        """Count the images that are correct at every example, the most that a mixed classifier can keep."""
        return self.n_images - len(set(self.image_M[self.label_ranks_M > 0].tolist()))


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
    clean_NK: Tensor  # the objective's images: LayerNormed logits, each row in descending order
    clamp: Clamp

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        """Return the criterion on the rows of a run, without those that it does not count."""

    @abstractmethod
    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        """Return the scores of the slab's candidates, (b, P, S); `kept` has the minimum number of images per beta."""

    @property
    def n_attacked(self) -> int:
        """The number of images of the constraint."""
        return self.attacked.n_images

    @property
    def n_objective(self) -> int:
        """The number of images of the objective."""
        return len(self.clean_NK)

    def required(self, beta: float) -> float:
        """Return how many images of the constraint `beta` requires, in the form of an entry of `kept` in `score`."""
        return kept_images(beta, self.n_attacked)

    def largest_inputs(self, biases: Sequence[float]) -> Tensor:
        """Return the largest |v| at each bias, over all images; `s |v|^p` must not overflow float32 there.

        It is at an end of the range of the logits, or where the clamp turns.
        """
        ends = torch.cat([rows_NK[:, [0, -1]].flatten() for rows_NK in (self.attacked.descending_MK, self.clean_NK)])
        inputs_2b = torch.stack(ends.aminmax())[:, None] + ends.new_tensor(biases)
        return clamp_logits(inputs_2b, self.clamp).abs().amax(dim=0).clamp_min(size_at_turn(self.clamp))

    def flipped(self, descending_NK: Tensor, bias: float) -> Tensor:
        """Return the rows whose smallest logit the clamp maps above the largest, for every scale and power.

        Each clamp increases, or first decreases and then increases, so its maximum over a row is at the largest or at
        the smallest logit.
        """
        top_N, bottom_N = clamp_logits(descending_NK[:, [0, -1]] + bias, self.clamp).unbind(dim=1)
        return bottom_N > top_N

    def class_changes(self, bias: float) -> int:
        """Count the images whose top class the transformation changes (violations of assumption 4.2)."""
        first_NK = self.attacked.descending_MK[: self.n_attacked]
        return sum(int(self.flipped(rows_NK, bias).sum()) for rows_NK in (first_NK, self.clean_NK))

    def only_rob_right(self, bias: float) -> int | None:  # noqa: ARG002
        """Count the clean images on which only M(rob) is correct (violations of assumption 4.1); None if unknown."""
        return None

    def _log1m_leads(self, rows: LeadRows, slab: Slab) -> tuple[Tensor, Tensor]:
        """Return log(1 - lead) of the attacked images, the largest per image, (P, S, n), and of the other rows."""
        log1m_PSN, n_points = log_one_minus_leads(rows, slab), len(self.attacked.image_M)
        return self.attacked.largest(log1m_PSN[..., :n_points]), log1m_PSN[..., n_points:]


@CRITERIA(
    "paper",
    describes="Algorithm 1: the fewest misclassified clean images at or above the margin threshold",
    order=2,
)
@dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 to the letter: top-2 margins; the fewest clean-and-wrong images at or above the threshold.

    The robust classifier is correct on the images `attacked` under attack, and wrong on the images `clean_NK`. Further
    adversarial examples do not count.
    """

    name: ClassVar[str] = "paper"
    maximized: ClassVar[bool] = False
    meaning: ClassVar[str] = "clean and wrong images above the margin threshold"

    @classmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        survived_B = rows.rob_attacked_BK.argmax(dim=1) == rows.labels_B
        wrong_B = rows.rob_clean_BK.argmax(dim=1) != rows.labels_B
        return cls.of(rows.rob_attacked_BK[survived_B], rows.rob_clean_BK[wrong_B], clamp=clamp, ln_k=ln_k)

    @classmethod
    def of(cls, attacked_correct_BK: Tensor, clean_wrong_BK: Tensor, *, clamp: Clamp, ln_k: int | None) -> Self:
        """Check the inputs of `select_parameters`, and return the criterion."""
        require_logits("attacked_correct_BK", attacked_correct_BK)
        require_attacked(len(attacked_correct_BK))
        labels_B = attacked_correct_BK.argmax(dim=1)
        examples = AttackedPoints.one_per_image(attacked_correct_BK, labels_B)
        attacked = Attacked.of("attacked_correct_BK", examples, labels_B, clamp=clamp, ln_k=ln_k)
        like = attacked.descending_MK
        _, wrong_BK = normed_logits("clean_wrong_BK", clean_wrong_BK, clamp=clamp, ln_k=ln_k, like=like)
        return cls(attacked, wrong_BK, clamp)

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        rows_NK = torch.cat([self.attacked.descending_MK, self.clean_NK])
        top_ranks_N = self.flipped(rows_NK, slab.bias).long() * (rows_NK.shape[1] - 1)
        lead_rows = LeadRows(rows_NK, top_ranks_N, torch.full_like(rows_NK[:, 0], torch.nan))
        attacked_PSn, wrong_PSE = self._log1m_leads(lead_rows, slab)
        thresholds_bPS = self.thresholds(sort_rows(attacked_PSn), kept)
        counts, n_kept = (
            torch.stack([(log1m <= threshold_PS[..., None]).sum(dim=-1) for threshold_PS in thresholds_bPS])
            for log1m in (wrong_PSE, attacked_PSn)
        )
        return Scores(thresholds_bPS, counts, n_kept)

    def thresholds(self, log1m_margins_PSn: Tensor, kept: Sequence[float]) -> Tensor:
        """Return log(1 - threshold) for each number of images to keep, (b, P, S), from sorted values.

        A fractional number interpolates the margins linearly between the two ranks next to it.
        """
        last = log1m_margins_PSn.shape[-1] - 1
        found = []
        for rank in kept:
            low, weight = int(rank) - 1, rank % 1
            above, below = log1m_margins_PSn[..., low], log1m_margins_PSn[..., min(low + 1, last)]
            found.append(torch.logaddexp(above + math.log1p(-weight), below + math.log(weight)) if weight else above)
        return torch.stack(found)


@CRITERIA(
    "paper-interpolated", describes="Algorithm 1 with the interpolated quantile of the paper's reference code", order=3
)
@dataclass(frozen=True)
class InterpolatedPaperCriterion(PaperCriterion):
    """Algorithm 1 with `numpy.percentile`'s linear interpolation, as the reference code computes the threshold.

    The threshold lies between two margins, so it keeps one image fewer than `beta` asks for unless the quantile equals
    a margin. `paper` uses the order statistic that satisfies the constraint on the data.
    """

    name: ClassVar[str] = "paper-interpolated"

    def required(self, beta: float) -> float:
        """Return the rank of the quantile among the descending margins, from 1; fractional between two of them."""
        return 1 + beta * (self.n_attacked - 1)


@CRITERIA("exact", describes="signed margins; the most correct clean images", order=1)
@dataclass(frozen=True)
class ExactCriterion(Criterion):
    """Signed margins in the constraint; the most correct clean images at T = 0, in closed form.

    `attacked` are the images on which the robust classifier is robust, `clean_NK` all clean images. The mixed class is
    the top class t of M(rob) if `alpha (p_t - p_k) > 1 - alpha`, and otherwise the class k of the standard classifier.
    So a clean image on which exactly one of the two is correct changes once as the threshold decreases, when the
    threshold passes the lead `p_t - p_k`. The count of correct images is a step function of the threshold, which
    `best_thresholds` maximizes.
    """

    top_right_N: Tensor  # bool: the robust classifier is correct on the clean image
    bottom_right_N: Tensor  # bool: the label is the class that the robust classifier finds least likely
    std_right_N: Tensor  # bool: the standard classifier is correct
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
        """Check the inputs of `select_parameters_exact`, and return the criterion."""
        require_logits("attacked_BK", attacked_BK)
        labels_B = class_indices("attacked_labels_B", attacked_labels_B, attacked_BK)
        clean_BK, descending_BK = normed_logits("clean_BK", clean_BK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
        if not len(clean_BK):
            raise InvalidInputError("clean_BK has no image: the exact criterion needs clean images to count")
        right_B = attacked_BK.argmax(dim=1) == labels_B
        require_attacked(int(right_B.sum()))
        examples = AttackedPoints.one_per_image(attacked_BK, labels_B)
        examples = (examples if points is None else examples.joined(points)).of_images(right_B)
        attacked = Attacked.of("attacked_BK", examples, labels_B[right_B], clamp=clamp, ln_k=ln_k)
        clean_labels_B = class_indices("clean_labels_B", clean_labels_B, clean_BK)
        std_pred_B = class_indices("std_pred_B", std_pred_B, clean_BK)
        return cls(
            attacked,
            descending_BK,
            clamp,
            top_right_N=clean_BK.argmax(dim=1) == clean_labels_B,
            bottom_right_N=clean_BK.argmin(dim=1) == clean_labels_B,
            std_right_N=std_pred_B == clean_labels_B,
            std_logits_N=clean_BK.gather(1, std_pred_B[:, None]).squeeze(1),
        )

    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        attacked_PSn, open_PSE, rob_right_E = self.log1m_leads(slab)
        log_thresholds, gained, n_kept = best_thresholds(attacked_PSn, open_PSE, rob_right_E, kept)
        return Scores(log_thresholds, gained + int(self.std_right_N.sum()), n_kept)  # gained over `std` alone

    def log1m_leads(self, slab: Slab) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first three arguments of `best_thresholds`."""
        flipped_N = self.flipped(self.clean_NK, slab.bias)
        rob_right_N = torch.where(flipped_N, self.bottom_right_N, self.top_right_N)
        open_N = rob_right_N ^ self.std_right_N  # if both are right or both are wrong, no weight changes that
        # If the clamp changes the top class, the margin is the signed one, which holds for any class of `std`.
        rivals_M = self.attacked.rivals_M.masked_fill(self.flipped(self.attacked.descending_MK, slab.bias), torch.nan)
        lead_rows = LeadRows(
            torch.cat([self.attacked.descending_MK, self.clean_NK[open_N]]),
            torch.cat([self.attacked.label_ranks_M, flipped_N[open_N].long() * (self.clean_NK.shape[1] - 1)]),
            torch.cat([rivals_M, self.std_logits_N[open_N]]),
        )
        return *self._log1m_leads(lead_rows, slab), rob_right_N[open_N]

    def only_rob_right(self, bias: float) -> int | None:
        rob_right_N = torch.where(self.flipped(self.clean_NK, bias), self.bottom_right_N, self.top_right_N)
        return int((rob_right_N & ~self.std_right_N).sum())


def best_thresholds(
    attacked_PSn: Tensor, open_PSE: Tensor, rob_right_E: Tensor, kept: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best threshold of every candidate that keeps enough images, as log(1 - threshold).

    With L = log(1 - threshold), the robust classifier decides the clean rows with a value below L, and an attacked
    image is kept if its value is at most L. Let `v_1 <= ... <= v_E` be the values of the clean rows. If L is in the
    interval j, `(v_j, v_{j+1}]`, the robust classifier decides the first j rows. Compared with the standard classifier
    alone, this gains an image for each row on which the robust classifier is right, and loses one for each other row.

    L is at least the order statistic that keeps enough images, and at most 0. The best L has the largest gain. Among
    equal gains, it keeps the most images, and then it is the smallest.

    Args:
        attacked_PSn: log(1 - margin) of the attacked images.
        open_PSE: log(1 - lead) of the clean rows on which exactly one of the two classifiers is right.
        rob_right_E: on which of these rows the robust classifier is right.
        kept: the minimum number of images to keep, per beta.

    Returns:
        The best L, its gain, and the number of images that it keeps, each (b, P, S).
    """
    values, order = open_PSE.clamp(max=0.0).sort(dim=-1)
    gains = pad(torch.where(rob_right_E, 1, -1)[order].cumsum(dim=-1), (1, 0))  # in interval 0, 1, ... E
    attacked = sort_rows(attacked_PSn)
    found = [_best_threshold(attacked, values, gains, int(n_needed)) for n_needed in kept]
    log_thresholds, gained, n_kept = map(torch.stack, zip(*found, strict=True))
    return log_thresholds, gained, n_kept


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
    log_thresholds = torch.where((gains.gather(-1, at) == most) | ~feasible, smallest, middle)
    return log_thresholds.squeeze(-1), most.squeeze(-1), n_kept.squeeze(-1)


def require_attacked(n_images: int) -> None:
    """Raise InvalidInputError if no attacked image can set a margin threshold."""
    if n_images == 0:
        raise InvalidInputError(
            "no attacked image is classified correctly by `rob`: no margin can set the threshold. Is `rob` the "
            "robust one (`std` comes first), and is eps, in units of the pixel range, one that it was trained for?"
        )

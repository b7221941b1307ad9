"""The criteria of Algorithm 1: they score each candidate from the margins of the attacked and of the clean images.

A criterion is a registered class. It is made from the rows of a run (`from_rows`) and scores the candidates of a slab
(`score`): the cutoff of each, the objective's count at that cutoff, and how many images the candidate keeps.

Shapes: B images of the run, N rows of logits, M attacked points of n images, E clean rows that are counted, K classes,
P powers, S scales, b betas.
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
from .inputs import AttackedPoints, CachedLogits, Owners, normed_logits
from .kernel import GapRows, Slab, log_one_minus_gaps, sort_rows


class Scores(NamedTuple):
    """The scores of every candidate at every beta: three tensors of the same shape."""

    log_cutoffs: Tensor  # float64, log(1 - cutoff)
    counts: Tensor  # int64, images that the objective counts
    kept: Tensor  # int64, images of the constraint with a margin at or above the cutoff


@dataclass(frozen=True)
class Images:
    """LayerNormed logits, each row in descending order.

    Each clamp rises, or falls then rises, so its maximum over a row is at the largest or at the smallest logit.
    """

    descending_NK: Tensor

    def __len__(self) -> int:
        return len(self.descending_NK)

    def flipped(self, bias: float, clamp: Clamp) -> Tensor:
        """Where the clamp maps the smallest logit above the largest; scale and power do not change this."""
        top_N, bottom_N = clamp_logits(self.descending_NK[:, [0, -1]] + bias, clamp).unbind(dim=1)
        return bottom_N > top_N

    def top_ranks(self, bias: float, clamp: Clamp) -> Tensor:
        """The rank, in the row, of the class of the largest mapped logit: the first or the last."""
        return self.flipped(bias, clamp).long() * (self.descending_NK.shape[1] - 1)

    def largest_inputs(self, biases: Sequence[float], clamp: Clamp) -> Tensor:
        """The largest |v| at each bias: at an end of the range or where the clamp turns; 0 without images."""
        if not len(self):
            return self.descending_NK.new_zeros(len(biases))
        ends_2 = torch.stack([self.descending_NK[:, 0], self.descending_NK[:, -1]]).flatten().aminmax()
        inputs_2b = torch.stack(ends_2)[:, None] + self.descending_NK.new_tensor(biases)
        lowest = clamp_shape(clamp).lowest
        return clamp_logits(inputs_2b, clamp).abs().amax(dim=0).clamp_min(abs(lowest) if math.isfinite(lowest) else 0.0)


@dataclass(frozen=True)
class Attacked(Images):
    """The attacked points of the constraint's images: one a row, in the order of `owners`."""

    owners: Owners
    label_ranks_M: Tensor  # int64: the rank of the label's logit in the row, 0 where rob is right
    rivals_M: Tensor  # float64: the logit of the class that the margin is taken to; NaN: the best class but the label

    @classmethod
    def of_correct(cls, descending_NK: Tensor) -> Self:
        """One point an image, each right for rob."""
        owners, _ = Owners.of(len(descending_NK), torch.empty(0, dtype=torch.int64, device=descending_NK.device))
        ranks_N = torch.zeros(len(descending_NK), dtype=torch.int64, device=descending_NK.device)
        return cls(descending_NK, owners, ranks_N, torch.full_like(descending_NK[:, 0], torch.nan))

    def with_points(self, points: "Attacked", image_P: Tensor) -> "Attacked":
        """These, which are one point of every image, and further ones of the images `image_P`."""
        if not len(points):
            return self
        owners, order_P = Owners.of(len(self), image_P)
        return Attacked(
            torch.cat([self.descending_NK, points.descending_NK[order_P]]),
            owners,
            torch.cat([self.label_ranks_M, points.label_ranks_M[order_P]]),
            torch.cat([self.rivals_M, points.rivals_M[order_P]]),
        )

    def n_right(self) -> int:
        """Images that rob gets right at every point, an upper bound of what a mixture keeps."""
        wrong_n = torch.zeros(self.owners.n_images, dtype=torch.bool, device=self.descending_NK.device)
        wrong_n[self.owners.image_M[self.label_ranks_M > 0]] = True
        return int((~wrong_n).sum())

    def first(self) -> Images:
        """The first point of every image, which is that of the minimum-margin attack."""
        return Images(self.descending_NK[: self.owners.n_images])


class Criterion(ABC):
    """How candidates are scored and compared.

    A subclass registers itself with `CRITERIA(name, describes=...)`. The package's decisions depend on the attributes
    below, never on the name.
    """

    name: ClassVar[str]
    maximised: ClassVar[bool]  # the objective
    meaning: ClassVar[str] = "objective"  # what the objective counts, a share of images: the label of its axis
    # True: `score` takes the best cutoff among those that keep at least a share beta. False: it takes the cutoff that
    # keeps just beta. Refinement rounds need True.
    inequality: ClassVar[bool] = False
    compared_with: ClassVar[str | None] = None  # a criterion whose choice a note compares with this one's
    attacked: Attacked  # of the constraint
    clean: Images  # of the objective
    clamp: Clamp

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: CachedLogits, *, clamp: Clamp, ln_k: int | None) -> Self:
        """The criterion on the rows of a run, without those that it does not count."""

    @abstractmethod
    def score(self, slab: Slab, kept: Sequence[float]) -> Scores:
        """Scores of the slab's candidates, shape (b, P, S); `kept` has the least images to keep at each beta."""

    @property
    def n_attacked(self) -> int:
        """Images of the constraint."""
        return self.attacked.owners.n_images

    def required(self, beta: float) -> float:
        """Return how many of these images `beta` asks for, which `score` takes as one of `kept`."""
        return kept_images(beta, self.n_attacked)

    def largest_inputs(self, biases: Sequence[float]) -> Tensor:
        """The largest |v| of any image at each bias; `s |v|^p` of it must not overflow float32."""
        return torch.maximum(*(images.largest_inputs(biases, self.clamp) for images in (self.attacked, self.clean)))

    def class_changes(self, bias: float) -> int:
        """Images whose top class the transformation changes (violations of assumption 4.2)."""
        return sum(int(images.flipped(bias, self.clamp).sum()) for images in (self.attacked.first(), self.clean))

    def only_rob_right(self, bias: float) -> int | None:  # noqa: ARG002
        """Clean images that M(rob) gets right and std wrong (violations of assumption 4.1); None where unknown."""
        return None

    def _log_gaps(self, rows: GapRows, slab: Slab) -> tuple[Tensor, Tensor]:
        """log(1 - gap) of each attacked image, the largest over its points, (P, S, n), and of the rows behind them."""
        gaps_PSN, n_points = log_one_minus_gaps(rows, slab), len(self.attacked)
        return self.attacked.owners.largest(gaps_PSN[..., :n_points]), gaps_PSN[..., n_points:]


@CRITERIA(
    "paper",
    describes="Algorithm 1 to the letter: the fewest clean-and-wrong images at or above the margin threshold",
    order=2,
)
@dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 to the letter: top-2 margins; the fewest clean-and-wrong images at or above the cutoff.

    `attacked` are the attacked images that rob gets right, `clean` the clean images that it gets wrong.
    """

    attacked: Attacked
    clean: Images
    clamp: Clamp
    name: ClassVar[str] = "paper"
    maximised: ClassVar[bool] = False
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
        """The checked inputs of `select_parameters`."""
        _, attacked_BK = normed_logits("attacked_correct_BK", attacked_correct_BK, clamp=clamp, ln_k=ln_k)
        require_attacked(len(attacked_BK))
        _, wrong_BK = normed_logits("clean_wrong_BK", clean_wrong_BK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
        if std_correct_B is not None:
            wrong_BK = wrong_BK[_mask("std_correct_B", std_correct_B, wrong_BK)]
        attacked = Attacked.of_correct(attacked_BK)
        if points is not None:
            _, points_PK = normed_logits("points", points.rob_logits_PK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
            attacked = attacked.with_points(Attacked.of_correct(points_PK), _rows_of(points, attacked_BK))
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
        """The rank of the quantile among the margins in descending order, from 1; fractional between two of them."""
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
    """Signed margins in the constraint; the most clean images that the T = 0 mixture gets right, in closed form.

    `attacked` are the points of the images on which rob is robust, `clean` all clean images. The mixture's class is
    M(rob)'s top class t where `alpha (p_t - p_k) > 1 - alpha`, else std's class k. So, as the cutoff falls, a clean
    image changes where only one of M(rob) and std is right, once, where the cutoff passes its gap `p_t - p_k`: the
    count is a step function of the cutoff, and the best cutoff that keeps at least beta is taken (`best_cutoffs`).
    """

    attacked: Attacked
    clean: Images
    clamp: Clamp
    clean_labels_N: Tensor
    top_N: Tensor  # rob's clean classes, and the classes that it finds least likely
    bottom_N: Tensor
    std_pred_N: Tensor
    std_logits_N: Tensor  # rob's LayerNormed clean logits of std's classes
    name: ClassVar[str] = "exact"
    maximised: ClassVar[bool] = True
    meaning: ClassVar[str] = "clean accuracy of the mixture"
    inequality: ClassVar[bool] = True
    compared_with: ClassVar[str | None] = "paper"

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
        """The checked inputs of `select_parameters_exact`."""
        normed_BK, descending_BK = normed_logits("attacked_BK", attacked_BK, clamp=clamp, ln_k=ln_k)
        clean_BK, clean_descending_BK = normed_logits("clean_BK", clean_BK, clamp=clamp, ln_k=ln_k, like=normed_BK)
        if not len(clean_BK):
            raise InvalidInputError("clean_BK has no image: the exact criterion needs clean images to count")
        labels_B = class_indices("attacked_labels_B", attacked_labels_B, normed_BK)
        right_B = normed_BK.argmax(dim=1) == labels_B
        require_attacked(int(right_B.sum()))
        attacked = Attacked.of_correct(descending_BK[right_B])
        if points is not None:
            _rows_of(points, normed_BK)
            further = points.of_images(right_B)
            signed = _signed_points(further, labels_B[right_B], clamp=clamp, ln_k=ln_k, like=normed_BK)
            attacked = attacked.with_points(signed, further.image_P.to(normed_BK.device))
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
        gap_rows, gains_E = self._gap_rows(slab)
        attacked_PSn, open_PSE = self._log_gaps(gap_rows, slab)
        log_cutoffs, gained, n_kept = best_cutoffs(attacked_PSn, open_PSE, gains_E, kept)
        n_std_right = int((self.std_pred_N == self.clean_labels_N).sum())  # the count where rob decides nothing
        return Scores(log_cutoffs, gained + n_std_right, n_kept)

    def _gap_rows(self, slab: Slab) -> tuple[GapRows, Tensor]:
        """Return the rows to measure, and +1 or -1 for each clean row: whether rob's decision gains or loses."""
        flipped_N = self.clean.flipped(slab.bias, slab.clamp)
        rob_right_N, std_right_N = self._rob_right(flipped_N), self.std_pred_N == self.clean_labels_N
        open_N = rob_right_N ^ std_right_N  # both right or both wrong: no weight changes that
        # Where the clamp moves rob's class off the top, the margin is the signed one, which holds for any class of std.
        rivals_M = self.attacked.rivals_M.masked_fill(self.attacked.flipped(slab.bias, slab.clamp), torch.nan)
        gap_rows = GapRows(
            torch.cat([self.attacked.descending_NK, self.clean.descending_NK[open_N]]),
            torch.cat([self.attacked.label_ranks_M, self.clean.top_ranks(slab.bias, slab.clamp)[open_N]]),
            torch.cat([rivals_M, self.std_logits_N[open_N]]),
        )
        return gap_rows, torch.where(rob_right_N[open_N], 1, -1)

    def only_rob_right(self, bias: float) -> int | None:
        rob_right_N = self._rob_right(self.clean.flipped(bias, self.clamp))
        return int((rob_right_N & (self.std_pred_N != self.clean_labels_N)).sum())

    def _rob_right(self, flipped_N: Tensor) -> Tensor:
        return torch.where(flipped_N, self.bottom_N, self.top_N) == self.clean_labels_N


def best_cutoffs(
    attacked_PSn: Tensor, open_PSE: Tensor, gains_E: Tensor, kept: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """(log(1 - cutoff), sum of gains, images kept) of the best cutoff that keeps so many images; each (b, P, S).

    With L = log(1 - cutoff), rob decides the rows with a value below L, and an image is kept where its value is at most
    L. Let `v_1 <= ... <= v_E` be the open rows' values. For L in `(v_j, v_{j+1}]` the sum is that of the first j gains,
    so the search is over j. L starts at the order statistic a that keeps just enough, and ends at 0, a cutoff of 0.
    Among equal sums the most images kept, which is the largest j; then the smallest L that has both.
    """
    values, order = open_PSE.clamp(max=0.0).sort(dim=-1)
    attacked = sort_rows(attacked_PSn)
    sums = pad(gains_E[order].cumsum(dim=-1), (1, 0))  # of the first 0, 1, ... E gains
    found = [_best_cutoff(attacked, values, sums, int(n_needed)) for n_needed in kept]
    log_cutoffs, gained, n_kept = map(torch.stack, zip(*found, strict=True))
    return log_cutoffs, gained, n_kept


def _best_cutoff(attacked: Tensor, values: Tensor, sums: Tensor, n_needed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best cutoff of each candidate for one beta, from sorted margins; see `best_cutoffs`."""
    starts, ends = (
        pad(values, (1, 0), value=-torch.inf),
        pad(values, (0, 1)),
    )  # interval j is (v_j, v_{j+1}] or (v_E, 0]
    j = torch.arange(ends.shape[-1], device=sums.device)
    least = attacked[..., n_needed - 1, None].contiguous()  # the smallest L that keeps enough
    at = torch.searchsorted(values, least)
    allowed = (j == at) | ((j > at) & (starts < ends))
    most = sums.masked_fill(~allowed, torch.iinfo(sums.dtype).min).amax(dim=-1, keepdim=True)
    best = allowed & (sums == most)
    last_end = ends.gather(-1, (best * j).amax(dim=-1, keepdim=True))
    feasible = least <= 0
    n_kept = torch.searchsorted(attacked, torch.where(feasible, last_end, least), right=True)
    lowest = attacked.gather(-1, (n_kept - 1).clamp_min(0))  # the smallest L that keeps so many
    first = torch.searchsorted(values, lowest)
    # If only later intervals reach the sum, no image's value lies there: L is put in the middle of the first of them.
    later = (best & (j > first)).int().argmax(dim=-1, keepdim=True)
    middle = (starts.gather(-1, later) + ends.gather(-1, later)) / 2
    log_cutoffs = torch.where((sums.gather(-1, first) == most) | ~feasible, lowest, middle)
    return log_cutoffs.squeeze(-1), most.squeeze(-1), n_kept.squeeze(-1)


def require_attacked(n_images: int) -> None:
    """Raises InvalidInputError where there is no attacked image to set a cutoff from."""
    if n_images == 0:
        raise InvalidInputError(
            "no attacked image is classified correctly by `rob`: no margin can set the threshold. Is `rob` the "
            "robust one (`std` comes first), and is eps, in units of the pixel range, one that it was trained for?"
        )


def _signed_points(
    points: AttackedPoints, labels_B: Tensor, *, clamp: Clamp, ln_k: int | None, like: Tensor
) -> Attacked:
    """The points with the ranks of their labels and, where std's classes are given, the logits of those as rivals."""
    normed_PK, descending_PK = normed_logits("points", points.rob_logits_PK, clamp=clamp, ln_k=ln_k, like=like)
    label_P1 = labels_B[points.image_P.to(like.device)][:, None]
    ranks_P = (normed_PK > normed_PK.gather(1, label_P1)).sum(dim=1)
    rivals_P = torch.full_like(normed_PK[:, 0], torch.nan)
    if points.std_pred_P is not None:
        std_P1 = class_indices("points.std_pred_P", points.std_pred_P, normed_PK)[:, None]
        leads_P = (ranks_P == 0) & (std_P1 != label_P1).squeeze(1)
        rivals_P = torch.where(leads_P, normed_PK.gather(1, std_P1).squeeze(1), rivals_P)
    return replace(Attacked.of_correct(descending_PK), label_ranks_M=ranks_P, rivals_M=rivals_P)


def _rows_of(points: AttackedPoints, logits_BK: Tensor) -> Tensor:
    """`points.image_P` on the device of the images' logits; raises InvalidInputError where it names no row of them."""
    image_P, n_points = points.image_P.to(logits_BK.device), len(points.rob_logits_PK)
    if image_P.shape != (n_points,):
        raise InvalidInputError(
            f"points.image_P has shape {tuple(image_P.shape)}, expected ({n_points},): one image per point"
        )
    if len(image_P) and not 0 <= int(image_P.min()) <= int(image_P.max()) < len(logits_BK):
        raise InvalidInputError(
            f"points.image_P spans {int(image_P.min())} to {int(image_P.max())}, there are {len(logits_BK)} images"
        )
    return image_P


def _mask(name: str, mask_B: Tensor, logits_BK: Tensor) -> Tensor:
    if mask_B.shape != (len(logits_BK),):
        raise InvalidInputError(f"{name} has shape {tuple(mask_B.shape)}, expected ({len(logits_BK)},)")
    return mask_B.to(device=logits_BK.device, dtype=torch.bool)

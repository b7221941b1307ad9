"""Algorithm 1 of the paper: the scale, power, bias and mixing weight for every beta, from stored logits alone.

For each candidate (s, p, c), a criterion determines the margin threshold q with alpha = 1 / (1 + q), the objective at
q, and the number of images that the candidate keeps robust. Margins are stored as log(1 - margin), so that margins
close to 1 keep their precision.

The best candidate has the best count of the objective. Among candidates with equal counts, the best one keeps the most
images (if the criterion takes the best threshold that keeps at least beta), and then has the largest 1 - alpha, the
smallest power, the smallest scale, and the smallest |bias|.

Shapes: B images, K classes, P powers, S scales, n images of the constraint.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.clamps import Clamp
from ..mixing.margins import log_one_minus_top2_margin, require_logits
from .choice import Choice, weights_at
from .criteria import Criterion, ExactCriterion, PaperCriterion, Scores, require_attacked
from .grid import AXES, Grid, kept_images
from .kernel import Slab

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOG_FLOAT32_STEP = -24 * math.log(2)  # below this log(1 - q), a float32 q is 1
_WORTH_THREADS = 1 << 24  # clamped logits and powers; for fewer, starting threads takes longer than they save
_MEASURED = 1 << 22  # margins computed at a time, 32 MB per copy; a criterion makes about ten copies


def select_parameters(
    attacked_correct_BK: Tensor,
    clean_wrong_BK: Tensor,
    *,
    scales: Iterable[float] | None = None,
    powers: Iterable[float] | None = None,
    biases: Iterable[float] | None = None,
    betas: Iterable[float] | None = None,
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
) -> "Selection":
    """Run Algorithm 1 to the letter (criterion `paper`).

    Args:
        attacked_correct_BK: raw logits of the robust classifier on the attacked images that it classifies correctly.
        clean_wrong_BK: its raw logits on the clean images that it misclassifies. Without any, the objective is 0 for
            all candidates, and the rules for ties choose one.
        scales, powers, biases, betas: by default those of a configuration.

    Returns:
        A `Selection` whose objective, the share of clean-and-wrong images at or above the threshold, is minimized.

    Raises:
        InvalidInputError: if an argument cannot be used, or if no candidate can be deployed.
    """
    criterion = PaperCriterion.of(attacked_correct_BK, clean_wrong_BK, clamp=clamp, ln_k=ln_k)
    grid = Grid.checked(scales=scales, powers=powers, biases=biases, betas=betas, clamp=clamp, ln_k=ln_k)
    return search_grid(criterion, grid)


def select_parameters_exact(
    attacked_BK: Tensor,
    attacked_labels_B: Tensor,
    clean_BK: Tensor,
    clean_labels_B: Tensor,
    std_pred_B: Tensor,
    *,
    scales: Iterable[float] | None = None,
    powers: Iterable[float] | None = None,
    biases: Iterable[float] | None = None,
    betas: Iterable[float] | None = None,
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
) -> "Selection":
    """Run Algorithm 1 with signed margins and the exact clean accuracy (criterion `exact`).

    Args:
        attacked_BK: raw logits of the robust classifier on attacked images; those that it misclassifies are left out.
        clean_BK: its raw logits on all clean images; `std_pred_B` are the classes of the standard classifier there.
        scales, powers, biases, betas: by default those of a configuration.

    Returns:
        A `Selection` whose objective, the share of clean images that are correct at T = 0, is maximized among the
        candidates with a threshold of at least 0; the objective of the others is NaN.

    Raises:
        InvalidInputError: if an argument cannot be used, or if no candidate is feasible and deployable.
    """
    criterion = ExactCriterion.of(
        attacked_BK, attacked_labels_B, clean_BK, clean_labels_B, std_pred_B, clamp=clamp, ln_k=ln_k
    )
    grid = Grid.checked(scales=scales, powers=powers, biases=biases, betas=betas, clamp=clamp, ln_k=ln_k)
    return search_grid(criterion, grid)


def surrogate_alpha(attacked_correct_BK: Tensor, beta: float) -> float:
    """Return alpha_d of f_aux: Algorithm 1 without LayerNorm and clamp, s = p = 1 and c = 0 (paper, appendix B.2)."""
    require_logits("attacked_correct_BK", attacked_correct_BK)
    require_attacked(len(attacked_correct_BK))
    log1m_B = log_one_minus_top2_margin(attacked_correct_BK).sort().values
    alpha: float = weights_at(float(log1m_B[kept_images(beta, len(log1m_B)) - 1]))["alpha"]
    return alpha


@dataclass(frozen=True)
class Selection:
    """The outcome of Algorithm 1; tensors have the shape (betas, scales, powers, biases), on the CPU."""

    criterion: Criterion
    grid: Grid
    objectives: Tensor  # float64; NaN if infeasible, and if undeployable unless the criterion is the paper's
    log_one_minus_cutoffs: Tensor  # float64, log(1 - margin threshold)
    kept: Tensor  # int64: images of the constraint that reach the threshold
    infeasible: Tensor  # bool: the threshold is below 0
    undeployable: Tensor  # bool: float32 cannot represent the candidate's logits, threshold or 1 - alpha
    chosen: tuple[Choice | None, ...]  # one per beta, None if no candidate can be used

    @classmethod
    def of(cls, criterion: Criterion, grid: Grid, scores: Scores) -> "Selection":
        """Exclude the candidates that cannot be used, and choose the best one for each beta."""
        infeasible = scores.log_thresholds > 0
        undeployable = _undeployable(criterion, grid, scores.log_thresholds)
        hidden = infeasible | undeployable if criterion.inequality else infeasible
        usable = ~(infeasible | undeployable)
        return cls(
            criterion,
            grid,
            objectives=(scores.counts.double() / max(1, criterion.n_objective)).masked_fill(hidden, math.nan),
            log_one_minus_cutoffs=scores.log_thresholds,
            kept=scores.kept,
            infeasible=infeasible,
            undeployable=undeployable,
            chosen=tuple(_best(criterion, grid, scores, i, usable[i]) for i in range(len(grid.betas))),
        )

    @property
    def n_undeployable(self) -> int:
        """The number of candidates that cannot be deployed at one beta or more."""
        return int(self.undeployable.any(dim=0).sum())

    def for_beta(self, beta: float) -> Choice:
        """Return the best candidate at `beta`.

        Raises:
            InvalidInputError: if beta was not searched, or if no candidate is left there.
        """
        betas = self.grid.betas
        if beta not in betas:
            raise InvalidInputError(f"beta={beta} was not searched; these were: {', '.join(map(str, betas))}")
        i = betas.index(beta)
        if (choice := self.chosen[i]) is None:
            raise InvalidInputError(
                f"beta={beta}: none of {self.infeasible[i].numel()} candidates can be used: "
                f"{int(self.infeasible[i].sum())} have a threshold below 0 (the transformation itself breaks too many "
                f"attacked images), {int(self.undeployable[i].sum())} have logits, a threshold or a 1 - alpha that "
                "float32 cannot represent; search smaller scales and powers, or a smaller beta"
            )
        return choice

    def notes(self, *betas: float) -> tuple[str, ...]:
        """Return sentences about excluded candidates, an empty objective, grid edges and violated assumptions.

        Args:
            betas: whose choices to report on; by default all.
        """
        found = []
        if n_excluded := self.n_undeployable:
            found.append(
                f"{n_excluded:,} of {self.undeployable[0].numel():,} candidates {'was' if n_excluded == 1 else 'were'} "
                "left out at one beta or more because float32 cannot represent their logits, margin threshold or "
                "1 - alpha."
            )
        if self.criterion.n_objective == 0:
            found.append("No clean image is misclassified, so the objective is 0 for every candidate.")
        for beta, choice in zip(self.grid.betas, self.chosen, strict=True):
            if not betas or beta in betas:
                sentences = self._on(choice) if choice else ["no candidate is feasible and deployable."]
                found += [f"beta {beta}: {sentence}" for sentence in sentences]
        return tuple(found)

    def _on(self, choice: Choice) -> list[str]:
        found, n_objective = [], self.criterion.n_objective
        if choice.on_grid_edge:
            ends = ", ".join(f"{name} (at {getattr(choice, name):.3g})" for name in choice.on_grid_edge)
            keys = " and ".join(f"search.{AXES[name]}" for name in choice.on_grid_edge)
            found.append(f"the optimum lies on the grid's edge in {ends}; widen {keys}.")
        if choice.n_class_changes:
            found.append(
                f"the transformation changes the class of {choice.n_class_changes} of "
                f"{self.criterion.n_attacked + n_objective} images (assumption 4.2)."
            )
        if choice.n_only_rob_right:
            found.append(
                f"{choice.n_only_rob_right} of {n_objective} clean images "
                f"{'is' if choice.n_only_rob_right == 1 else 'are'} right for transformed rob and "
                "wrong for std (assumption 4.1)."
            )
        return found


def search_grid(
    criterion: Criterion, grid: Grid, *, n_widen: int = 0, score: Callable[[Grid], Scores] | None = None
) -> Selection:
    """Return the best candidate of every beta.

    Args:
        n_widen: the grid grows up to this many times, each time beyond the edges on which the best candidate of any
            beta lies.
        score: returns the scores of a grid; by default `score_candidates`.

    Raises:
        InvalidInputError: if no candidate is left at any beta.
    """
    score = score or partial(score_candidates, criterion)
    found = Selection.of(criterion, grid, score(grid))
    while found.grid.widenings < n_widen and (wider := found.grid.wider(*(each.at for each in found.chosen if each))):
        found = Selection.of(criterion, wider, score(wider))
    if not any(found.chosen):
        found.for_beta(grid.betas[0])  # raises with the reason
    return found


def score_candidates(criterion: Criterion, grid: Grid, kept: Sequence[float] | None = None) -> Scores:
    """Return the scores of every candidate, tensors of `grid.shape`.

    `kept` are the numbers of images to keep, by default those that the betas require.
    """
    kept = kept or [criterion.required(beta) for beta in grid.betas]
    shape = (len(kept), *grid.shape[1:])
    scores = Scores(
        torch.empty(shape, dtype=torch.float64),
        torch.empty(shape, dtype=torch.int64),
        torch.empty(shape, dtype=torch.int64),
    )

    def score(part: tuple[slice, int]) -> None:
        powers, bias = part
        found = criterion.score(Slab(grid.biases[bias], criterion.clamp, grid.powers[powers], grid.scales), kept)
        for into, values_bPS in zip(scores, found, strict=True):
            into[:, :, powers, bias] = values_bPS.mT.cpu()

    logits_NK, n_images = criterion.attacked.descending_MK, len(criterion.attacked.image_M) + len(criterion.clean_NK)
    width = max(1, _MEASURED // ((n_images + len(kept)) * len(grid.scales)))  # powers at a time, as memory allows
    starts = range(0, len(grid.powers), width)
    parts = [(slice(start, start + width), bias) for bias in range(len(grid.biases)) for start in starts]
    n_logits = n_images * logits_NK.shape[1] * len(grid.powers) * len(grid.biases)
    n_threads = torch.get_num_threads()
    worth_it = logits_NK.device.type == "cpu" and n_logits > _WORTH_THREADS
    # Many threads inside each small operation would synchronize so often that they mostly wait on a busy machine.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads if worth_it else 1) as pool:
            list(pool.map(score, parts))
    finally:
        torch.set_num_threads(n_threads)
    return scores


def _best(criterion: Criterion, grid: Grid, scores: Scores, beta: int, left: Tensor) -> Choice | None:
    """Return the best of the candidates in `left` at the beta with this index, or None if there is none."""
    if not bool(left.any()):
        return None
    log_thresholds, counts, kept = (values[beta] for values in scores)
    left = left & (counts == (counts[left].max() if criterion.maximized else counts[left].min()))
    if criterion.inequality:
        left &= kept == kept[left].max()
    left &= log_thresholds == log_thresholds[left].min()
    ties = [(grid.powers[p], grid.scales[s], abs(grid.biases[b]), (s, p, b)) for s, p, b in left.nonzero().tolist()]
    s, p, b = index = min(ties)[-1]
    scale, power, bias = grid.scales[s], grid.powers[p], grid.biases[b]
    count = int(counts[index])
    return Choice(
        scale,
        power,
        bias,
        **weights_at(float(log_thresholds[index])),
        clamp=grid.clamp,
        ln_k=grid.ln_k,
        beta=grid.betas[beta],
        objective=count / max(1, criterion.n_objective),
        objective_count=count,
        kept_predicted=int(kept[index]),
        n_robust=criterion.n_attacked,
        on_grid_edge=grid.on_edge((scale, power, bias)),
        n_only_rob_right=criterion.only_rob_right(bias),
        n_class_changes=criterion.class_changes(bias),
    )


def _undeployable(criterion: Criterion, grid: Grid, log_thresholds: Tensor) -> Tensor:
    """Return the candidates whose logits overflow float32, or whose threshold or 1 - alpha it rounds to 1 or 0."""
    largest_B = criterion.largest_inputs(grid.biases).cpu()
    powers_P1 = torch.tensor(grid.powers, dtype=torch.float64)[:, None]
    scales_S11 = torch.tensor(grid.scales, dtype=torch.float64)[:, None, None]
    overflow = scales_S11 * largest_B**powers_P1 > _FLOAT32_MAX
    thresholds = -torch.expm1(log_thresholds)
    vanishing = (thresholds / (1 + thresholds)).float() == 0
    saturated = log_thresholds < _LOG_FLOAT32_STEP
    return overflow | ((vanishing | saturated | log_thresholds.isnan()) & ~(log_thresholds > 0))

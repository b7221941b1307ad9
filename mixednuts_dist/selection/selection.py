"""Algorithm 1 of the paper: the scale, power, bias and mixing weight for every beta, from cached logits alone.

For each candidate the margin threshold q is the margin that at least a share beta of the attacked images reaches; alpha
= 1 / (1 + q). Margins are kept as log(1 - margin), so none is "almost 1". Two criteria decide which candidate is best:
`select_parameters` has the paper's, and `select_parameters_exact` maximizes the exact clean accuracy.

Shapes: B images, K classes, P powers, S scales, n images of the constraint.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..config.search_config import SearchConfig
from ..mixing.clamps import Clamp
from ..mixing.margins import log_one_minus_top2_margin, require_logits
from .criteria import Criterion, ExactCriterion, PaperCriterion, Scores, require_attacked
from .exploration import Selection
from .grid import Grid, kept_images, require_beta
from .inputs import AttackedPoints
from .kernel import Slab

__all__ = [
    "Selection",
    "score_candidates",
    "search_grid",
    "select_parameters",
    "select_parameters_exact",
    "surrogate_alpha",
]

_Part = tuple[slice, int]  # powers, and the index of a bias
_WORTH_THREADS = 1 << 24  # clamped logits and powers; for fewer, starting threads takes longer than they save
_MEASURED = 1 << 22  # margins held at a time, 32 MB a copy; a criterion makes about ten


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
    std_correct_B: Tensor | None = None,
    points: AttackedPoints | None = None,
) -> Selection:
    """Run Algorithm 1 to the letter (criterion `paper`).

    Args:
        attacked_correct_BK: raw logits of the robust classifier on the attacked images that it classifies correctly.
        clean_wrong_BK: its raw logits on the clean images that it misclassifies. Without any, the objective is 0 for
            all candidates and the ties decide.
        scales, powers, biases, betas: by default those of a configuration.
        std_correct_B: which clean-and-wrong images the standard classifier classifies correctly; if given, only those
            enter the objective (the relaxed objective of appendix D).
        points: further adversarial examples; each image counts with the smallest margin of all its examples.

    Returns:
        A `Selection` whose objective, the share of clean-and-wrong images at or above the threshold, is minimized.

    Raises:
        InvalidInputError: if logits, grids or betas cannot be used, or if no candidate can be deployed.
    """
    axes = {"scales": scales, "powers": powers, "biases": biases, "betas": betas}
    grid = Grid.configured(SearchConfig(), clamp, ln_k, **axes)
    criterion = PaperCriterion.of(
        attacked_correct_BK, clean_wrong_BK, clamp=clamp, ln_k=ln_k, std_correct_B=std_correct_B, points=points
    )
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
    points: AttackedPoints | None = None,
) -> Selection:
    """Run Algorithm 1 with signed margins and the exact clean accuracy (criterion `exact`).

    Args:
        attacked_BK: raw logits of the robust classifier on attacked images; those that it misclassifies are left out.
        clean_BK: its raw logits on all clean images; `std_pred_B` are the classes of the standard classifier there.
        scales, powers, biases, betas: by default those of a configuration.
        points: further adversarial examples; each image counts with the smallest margin of all its examples.

    Returns:
        A `Selection` whose objective, the share of clean images that are correct at T = 0, is maximized among the
        candidates with a threshold of at least 0; the objective of the others is NaN.

    Raises:
        InvalidInputError: if inputs cannot be used, or if no candidate is feasible and deployable.
    """
    axes = {"scales": scales, "powers": powers, "biases": biases, "betas": betas}
    grid = Grid.configured(SearchConfig(), clamp, ln_k, **axes)
    criterion = ExactCriterion.of(
        attacked_BK, attacked_labels_B, clean_BK, clean_labels_B, std_pred_B, clamp=clamp, ln_k=ln_k, points=points
    )
    return search_grid(criterion, grid)


def surrogate_alpha(attacked_correct_BK: Tensor, beta: float) -> float:
    """Return alpha_d of f_aux: Algorithm 1 without LayerNorm and clamp, s = p = 1 and c = 0 (paper, appendix B.2)."""
    require_beta(beta)
    require_logits("attacked_correct_BK", attacked_correct_BK)
    require_attacked(len(attacked_correct_BK))
    log_gaps_B = log_one_minus_top2_margin(attacked_correct_BK)
    log_cutoff = float(log_gaps_B.sort().values[kept_images(beta, len(log_gaps_B)) - 1])
    return 1 / (1 - math.expm1(log_cutoff))


def search_grid(criterion: Criterion, grid: Grid) -> Selection:
    """Return the best candidate of every beta.

    Raises:
        InvalidInputError: if no candidate is left at any beta.
    """
    found = Selection.of(criterion, grid, score_candidates(criterion, grid))
    if all(choice is None for choice in found.chosen):
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

    def score(part: _Part) -> None:
        powers, bias = part
        found = criterion.score(Slab(grid.biases[bias], criterion.clamp, grid.powers[powers], grid.scales), kept)
        for into, values_bPS in zip(scores, found, strict=True):
            into[:, :, powers, bias] = values_bPS.mT.cpu()

    logits_NK, n_images = criterion.attacked.descending_NK, len(criterion.attacked) + len(criterion.clean)
    n_logits = n_images * logits_NK.shape[1] * len(grid.powers) * len(grid.biases)
    n_threads = torch.get_num_threads()
    worth_it = logits_NK.device.type == "cpu" and n_logits > _WORTH_THREADS
    # Many threads inside each small operation would synchronize so often that they mostly wait on a busy machine.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads if worth_it else 1) as pool:
            list(pool.map(score, _parts(criterion, grid, len(kept))))
    finally:
        torch.set_num_threads(n_threads)
    return scores


def _parts(criterion: Criterion, grid: Grid, n_kept: int) -> list[_Part]:
    """Return the slabs: as many powers at a time as memory allows."""
    n_images = len(criterion.attacked) + len(criterion.clean) + n_kept
    width = max(1, _MEASURED // (n_images * len(grid.scales)))
    starts = range(0, len(grid.powers), width)
    return [(slice(start, start + width), bias) for bias in range(len(grid.biases)) for start in starts]

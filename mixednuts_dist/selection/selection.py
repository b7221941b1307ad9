"""Algorithm 1 of the paper: the scale, power, bias and mixing weight for every beta, from cached logits alone.

For each candidate the cutoff q is the margin that at least a share beta of the attacked images reaches; alpha =
1 / (1 + q). Margins are kept as log(1 - margin), so none is "almost 1". Two criteria say which candidate is best:
`select_parameters` is the paper's, `select_parameters_exact` maximises the mixture's exact clean accuracy.

Shapes: B images, K classes, P powers, S scales.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import Clamp
from .candidates import (
    CandidateGrid,
    class_indices,
    kept_images,
    normed_logits,
    require_beta,
    require_logits,
)
from .criteria import Criterion, ExactCriterion, Images, PaperCriterion
from .ordering import sort_rows
from .selection_kernel import Slab
from .selection_result import Selection

__all__ = [
    "Selection",
    "exact_criterion",
    "paper_criterion",
    "score_candidates",
    "select_parameters",
    "select_parameters_exact",
    "surrogate_alpha",
]

_Part = tuple[slice, int]  # powers, and the index of a bias
_WORTH_THREADS = 1 << 24  # clamped logits and powers; for fewer a new thread's cold memory costs more than it brings
_MEASURED = 1 << 22  # margins held at a time, 32 MB, of which the bounds make a dozen copies


def select_parameters(
    attacked_correct_BK: Tensor,
    clean_wrong_BK: Tensor,
    *,
    scales: Iterable[float],
    powers: Iterable[float],
    biases: Iterable[float],
    betas: Iterable[float],
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
    std_correct_B: Tensor | None = None,
) -> Selection:
    """Algorithm 1 to the letter (criterion `paper`).

    Args:
        attacked_correct_BK: rob's raw logits of the attacked images that it still gets right.
        clean_wrong_BK: rob's raw logits of the clean images that it gets wrong. Without any the objective is 0 for all
            candidates and the ties decide.
        std_correct_B: where given, which clean-and-wrong images std gets right; only those enter the objective (the
            relaxed objective of appendix D).

    Returns:
        A `Selection` whose objective, the share of clean-and-wrong images at or above the cutoff, is minimised.

    Raises:
        InvalidInputError: for logits, grids or betas that cannot be used, or where no candidate can be deployed.
    """
    grid = CandidateGrid.checked(scales=scales, powers=powers, biases=biases, betas=betas)
    criterion = paper_criterion(
        attacked_correct_BK, clean_wrong_BK, clamp=clamp, ln_k=ln_k, std_correct_B=std_correct_B
    )
    return search_grid(criterion, grid, ln_k)


def paper_criterion(
    attacked_correct_BK: Tensor,
    clean_wrong_BK: Tensor,
    *,
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
    std_correct_B: Tensor | None = None,
) -> PaperCriterion:
    """The checked inputs of `select_parameters` without a grid, for searches that cut the grid into slabs."""
    _, attacked_BK = normed_logits("attacked_correct_BK", attacked_correct_BK, clamp=clamp, ln_k=ln_k)
    _require_attacked(len(attacked_BK))
    _, wrong_BK = normed_logits("clean_wrong_BK", clean_wrong_BK, clamp=clamp, ln_k=ln_k, like=attacked_BK)
    if std_correct_B is not None:
        wrong_BK = wrong_BK[_mask("std_correct_B", std_correct_B, wrong_BK)]
    return PaperCriterion(Images(attacked_BK), Images(wrong_BK), clamp)


def select_parameters_exact(
    attacked_BK: Tensor,
    attacked_labels_B: Tensor,
    clean_BK: Tensor,
    clean_labels_B: Tensor,
    std_pred_B: Tensor,
    *,
    scales: Iterable[float],
    powers: Iterable[float],
    biases: Iterable[float],
    betas: Iterable[float],
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
) -> Selection:
    """Algorithm 1 with signed margins and the mixture's exact clean accuracy (criterion `exact`).

    Args:
        attacked_BK: rob's raw logits of attacked images; those that rob gets wrong are left out.
        clean_BK: rob's raw logits of all clean images; `std_pred_B` are std's classes of the same images.

    Returns:
        A `Selection` whose objective, the share of clean images that the T = 0 mixture gets right, is maximised among
        the candidates with a cutoff of at least 0; the objective of the others is NaN.

    Raises:
        InvalidInputError: for inputs that cannot be used, or where no candidate is feasible and deployable.
    """
    grid = CandidateGrid.checked(scales=scales, powers=powers, biases=biases, betas=betas)
    criterion = exact_criterion(
        attacked_BK, attacked_labels_B, clean_BK, clean_labels_B, std_pred_B, clamp=clamp, ln_k=ln_k
    )
    return search_grid(criterion, grid, ln_k)


def exact_criterion(
    attacked_BK: Tensor,
    attacked_labels_B: Tensor,
    clean_BK: Tensor,
    clean_labels_B: Tensor,
    std_pred_B: Tensor,
    *,
    clamp: Clamp = "gelu",
    ln_k: int | None = None,
) -> ExactCriterion:
    """The checked inputs of `select_parameters_exact` without a grid, for searches that cut the grid into slabs."""
    normed_BK, descending_BK = normed_logits("attacked_BK", attacked_BK, clamp=clamp, ln_k=ln_k)
    clean_BK, clean_descending_BK = normed_logits("clean_BK", clean_BK, clamp=clamp, ln_k=ln_k, like=normed_BK)
    if not len(clean_BK):
        raise InvalidInputError("clean_BK has no image: the exact criterion needs clean images to count")
    labels_B = class_indices("attacked_labels_B", attacked_labels_B, normed_BK)
    right_B = normed_BK.argmax(dim=1) == labels_B
    _require_attacked(int(right_B.sum()))
    std_pred_B = class_indices("std_pred_B", std_pred_B, clean_BK)
    return ExactCriterion(
        Images(descending_BK[right_B]),
        Images(clean_descending_BK),
        clamp,
        clean_labels_N=class_indices("clean_labels_B", clean_labels_B, clean_BK),
        top_N=clean_BK.argmax(dim=1),
        bottom_N=clean_BK.argmin(dim=1),
        std_pred_N=std_pred_B,
        std_logits_N=clean_BK.gather(1, std_pred_B[:, None]).squeeze(1),
    )


def surrogate_alpha(attacked_correct_BK: Tensor, beta: float) -> float:
    """alpha_d of f_aux: Algorithm 1's alpha with no LayerNorm, no clamp, s = p = 1 and c = 0 (paper, appendix B.2)."""
    require_beta(beta)
    require_logits("attacked_correct_BK", attacked_correct_BK)
    _require_attacked(len(attacked_correct_BK))
    log_gaps_B = log_one_minus_top2_margin(attacked_correct_BK)
    log_cutoff = float(log_gaps_B.sort().values[kept_images(beta, len(log_gaps_B)) - 1])
    return 1 / (1 - math.expm1(log_cutoff))


def search_grid(criterion: Criterion, grid: CandidateGrid, ln_k: int | None) -> Selection:
    """The best candidate of every beta, for inputs that `paper_criterion` or `exact_criterion` has checked.

    Raises:
        InvalidInputError: where no candidate is left at any beta.
    """
    log_cutoffs, counts = score_candidates(criterion, grid)
    found = Selection.of(criterion, grid, ln_k=ln_k, log_one_minus_cutoffs=log_cutoffs, counts=counts)
    if all(candidate is None for candidate in found.chosen):
        found.for_beta(grid.betas[0])  # raises, and says why nothing is left
    return found


def score_candidates(criterion: Criterion, grid: CandidateGrid) -> tuple[Tensor, Tensor]:
    """`log(1 - cutoff)` (float64) and the objective's count (int64) of every candidate, both of `grid.shape`.

    `Selection.of` makes the choice; scores of a grid cut along its biases are concatenated along the last axis.
    """
    kept = [kept_images(beta, len(criterion.attacked)) for beta in grid.betas]
    ranks = [k - 1 for k in kept]
    log_cutoffs = torch.empty(grid.shape, dtype=torch.float64)
    counts = torch.empty(grid.shape, dtype=torch.int64)

    def score(part: tuple[slice, int]) -> None:
        powers, bias = part
        slab = Slab(grid.biases[bias], criterion.clamp, grid.powers[powers], grid.scales)
        measured = criterion.measure(slab, kept)
        cutoffs_bPS = sort_rows(measured.attacked_PSN)[..., ranks].movedim(-1, 0)
        log_cutoffs[:, :, powers, bias] = cutoffs_bPS.mT.cpu()
        counts[:, :, powers, bias] = measured.count(cutoffs_bPS).mT.cpu()

    logits_NK, n_images = criterion.attacked.descending_NK, len(criterion.attacked) + len(criterion.clean)
    n_logits = n_images * logits_NK.shape[1] * len(grid.powers) * len(grid.biases)
    worth_it = logits_NK.device.type == "cpu" and n_logits > _WORTH_THREADS
    _in_threads(score, _parts(criterion, grid), n_helpers=torch.get_num_threads() - 1 if worth_it else 0)
    return log_cutoffs, counts


def _in_threads(score: Callable[[_Part], None], parts: Sequence[_Part], *, n_helpers: int) -> None:
    """A thread a slab, instead of many threads inside each of its small operations.

    On a busy machine the latter spend their time waiting for each other. Torch's number of threads is put back after.
    """
    n_threads = torch.get_num_threads()
    left = iter(parts)  # shared: each thread takes the next one

    def work() -> None:
        for part in left:
            score(part)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            helpers = [pool.submit(work) for _ in range(n_helpers)]
            work()
            for helper in helpers:
                helper.result()
    finally:
        torch.set_num_threads(n_threads)


def _parts(criterion: Criterion, grid: CandidateGrid) -> list[_Part]:
    """The slabs: as many powers at a time as memory allows."""
    n_images = len(criterion.attacked) + len(criterion.clean)
    width = max(1, _MEASURED // (n_images * len(grid.scales)))
    starts = range(0, len(grid.powers), width)
    return [(slice(start, start + width), bias) for bias in range(len(grid.biases)) for start in starts]


def _require_attacked(n_images: int) -> None:
    if n_images == 0:
        raise InvalidInputError(
            "no attacked image is classified correctly by rob: there is no margin to set the cutoff from"
        )


def _mask(name: str, mask_B: Tensor, logits_BK: Tensor) -> Tensor:
    if mask_B.shape != (len(logits_BK),):
        raise InvalidInputError(f"{name} has shape {tuple(mask_B.shape)}, expected ({len(logits_BK)},)")
    return mask_B.to(device=logits_BK.device, dtype=torch.bool)

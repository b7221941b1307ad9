"""Algorithm 1 on stored rows, in this process: what the search stage does through Ray Tune, for one question at a time.

Shapes: N images, K classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import SearchConfig, grid_values
from ..mixing.clamps import Clamp
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.mixture import Mixture, mixed_clean_correct, robust_lower_bound, tempered_log_probs
from ..mixing.transforms import LogitMap, layer_norm_logits
from ..selection.grid import kept_images
from ..selection.selection import Selection, select_parameters, select_parameters_exact
from ..storage.records import AttackRecords, SearchResult


@dataclass(frozen=True)
class Question:
    """What Algorithm 1 is asked: the candidates, the betas, the criterion."""

    scales: tuple[float, ...]
    powers: tuple[float, ...]
    biases: tuple[float, ...]
    betas: tuple[float, ...]
    criterion: str
    clamp: Clamp
    ln_k: int | None

    @classmethod
    def of(cls, search: SearchConfig, found: SearchResult, *, betas: Sequence[float] | None = None) -> "Question":
        """The run's own grid and criterion, with the clamp that it settled on; by default its deployed beta alone."""
        return cls(
            grid_values(search.scales),
            grid_values(search.powers),
            grid_values(search.biases),
            tuple(betas or (found.deployed_beta,)),
            search.criterion,
            found.clamp,
            found.ln_k,
        )

    def only(self, scale: float, power: float, bias: float) -> "Question":
        """The same with a single candidate, whose alpha is then all there is to find."""
        return replace(self, scales=(scale,), powers=(power,), biases=(bias,))


def select(rows: AttackRecords, question: Question, *, only_std_right: bool = False) -> Selection:
    """Algorithm 1's answer from these rows; errors as in `mixing.selection`.

    Args:
        only_std_right: with the criterion "paper", its objective over images that std gets right (appendix D's relaxed
            objective).
    """
    grid: dict[str, Any] = {
        "scales": question.scales,
        "powers": question.powers,
        "biases": question.biases,
        "betas": question.betas,
        "ln_k": question.ln_k,
    }
    std_pred_N = rows.std_clean_NK.argmax(dim=1)
    if question.criterion == "exact":
        return select_parameters_exact(
            rows.rob_attacked_NK, rows.labels_N, rows.rob_clean_NK, rows.labels_N, std_pred_N,
            clamp=question.clamp, **grid,
        )  # fmt: skip
    survived_N = layer_norm_logits(rows.rob_attacked_NK, question.ln_k).argmax(dim=1) == rows.labels_N
    wrong_N = layer_norm_logits(rows.rob_clean_NK, question.ln_k).argmax(dim=1) != rows.labels_N
    return select_parameters(
        rows.rob_attacked_NK[survived_N], rows.rob_clean_NK[wrong_N], clamp=question.clamp,
        std_correct_B=(std_pred_N == rows.labels_N)[wrong_N] if only_std_right else None, **grid,
    )  # fmt: skip


def weighted(rows: AttackRecords, transform: LogitMap, beta: float) -> Mixture:
    """Any map of rob's logits with the alpha that keeps a share beta of its attacked and correct images.

    The cutoff is Algorithm 1's order statistic of the map's signed margins; a negative one counts as 0.
    """
    mapped_NK = transform(rows.rob_attacked_NK.double())
    right_N = mapped_NK.argmax(dim=1) == rows.labels_N
    log_gaps = log_one_minus_signed_margin(mapped_NK[right_N], rows.labels_N[right_N]).sort().values
    log_cutoff = log_gaps[kept_images(beta, len(log_gaps)) - 1] if len(log_gaps) else torch.zeros(())
    cutoff = float(-torch.expm1(log_cutoff))
    return Mixture(transform, 1 / (1 + cutoff), cutoff / (1 + cutoff))


def clean_correct(mixture: Mixture, rows: AttackRecords) -> Tensor:
    """Which clean images the mixture gets right, (N,) bool, from the stored logits: exact at any temperature."""
    if mixture.temperature > 0:
        return mixture.classes(rows.std_clean_NK, rows.rob_clean_NK) == rows.labels_N
    return mixed_clean_correct(rows.rob_clean_NK, rows.labels_N, rows.std_clean_NK.argmax(dim=1), mixture)


def robust_bound(mixture: Mixture, rows: AttackRecords) -> Tensor:
    """Which images are right under the stored perturbations, whatever std says, (N,) bool."""
    return robust_lower_bound(rows.rob_attacked_NK, rows.labels_N, mixture)


def at_clean_accuracy(rows: AttackRecords, mixture: Mixture, n_correct: int) -> Mixture:
    """The mixture with the largest alpha that still gets `n_correct` of these clean images right.

    Searched over 400 weights of std, 1 - alpha from 1e-6 to 1/2; where none gets so many right, the best one.
    """
    std_NK, rob_NK = _clean_log_probs(mixture, rows)
    weights = torch.logspace(-6, math.log10(0.5), 400, dtype=torch.float64).tolist()
    counts = []
    for weight in weights:
        mixed_NK = torch.logaddexp(std_NK + math.log(weight), rob_NK + math.log1p(-weight))
        counts.append(int((mixed_NK.argmax(dim=1) == rows.labels_N).sum()))
    reached = min(n_correct, max(counts))
    best = next(weight for weight, count in zip(weights, counts, strict=True) if count >= reached)
    return replace(mixture, alpha=1 - best, one_minus_alpha=best)


def _clean_log_probs(mixture: Mixture, rows: AttackRecords) -> tuple[Tensor, Tensor]:
    std_NK = tempered_log_probs(rows.std_clean_NK.double(), mixture.temperature)
    return std_NK, mixture.transform(rows.rob_clean_NK.double()).log_softmax(dim=1)

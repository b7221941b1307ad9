"""Algorithm 1 written again, slowly: 50-digit arithmetic, one image and one candidate at a time, sharing no formula."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import torch
from torch import Tensor

from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.inputs import AttackedPoints

mpmath.mp.dps = 50
Row = list[Any]  # mpmath.mpf values


def layer_norm(logits: Sequence[float], ln_k: int | None = None) -> Row:
    row = [mpmath.mpf(value) for value in logits]
    width = min(len(row), 250) if ln_k is None else ln_k
    top = sorted(row, reverse=True)[:width]
    mean = mpmath.fsum(top) / width
    variance = mpmath.fsum((value - mean) ** 2 for value in top) / (width - 1)
    return [(value - mean) / mpmath.sqrt(variance + mpmath.mpf("1e-8")) for value in row]


def clamp(u: Any, name: str) -> Any:
    if name == "gelu":
        return u * mpmath.erfc(-u / mpmath.sqrt(2)) / 2
    if name == "softplus":
        return mpmath.log1p(mpmath.exp(u))
    if name == "linear" or u > 0:
        return u
    return mpmath.mpf(0) if name == "relu" else mpmath.expm1(u)


def mapped(normed: Row, scale: float, power: float, bias: float, name: str = "gelu") -> Row:
    values = [clamp(value + mpmath.mpf(bias), name) for value in normed]
    return [scale * abs(v) ** mpmath.mpf(power) * mpmath.sign(v) for v in values]


def top(row: Row) -> int:
    return max(range(len(row)), key=lambda j: (row[j], -j))


def log_one_minus_lead(row: Row, winner: int, rival: int) -> Any:
    highest = row[top(row)]
    weights = [mpmath.exp(value - highest) for value in row]
    others = mpmath.fsum(weight for j, weight in enumerate(weights) if j != winner)
    return mpmath.log((others + weights[rival]) / (others + weights[winner]))


def log_one_minus_margin(row: Row, label: int | None = None) -> Any:
    winner = top(row) if label is None else label
    rival = max((j for j in range(len(row)) if j != winner), key=lambda j: (row[j], -j))
    return log_one_minus_lead(row, winner, rival)


@dataclass(frozen=True)
class Answer:
    log_cutoff: Any
    objective: float
    usable: bool
    kept: int


def kth_largest_margin(log_gaps: Row, beta: float) -> Any:
    keep = max(1, math.ceil(Fraction(str(beta)) * len(log_gaps)))
    return sorted(log_gaps)[keep - 1]


def deployable(log_cutoff: Any, rows: list[Row]) -> bool:
    cutoff = -mpmath.expm1(log_cutoff)
    largest = max(abs(value) for row in rows for value in row)
    step = mpmath.mpf(2) ** -24
    return bool(largest < 3.4e38 and 1 - cutoff >= step and float(torch.tensor(float(cutoff / (1 + cutoff)))) > 0)


def paper_answers(attacked: Tensor, wrong: Tensor, grid: Grid) -> list[list[Answer]]:
    """One list per beta, one answer per candidate in the order of the grid."""
    normed = [[layer_norm(row) for row in rows.double().tolist()] for rows in (attacked, wrong)]
    answers: list[list[Answer]] = [[] for _ in grid.betas]
    for scale, power, bias in grid:
        rows = [[mapped(row, scale, power, bias, grid.clamp) for row in part] for part in normed]
        gaps = [[log_one_minus_margin(row) for row in part] for part in rows]
        for i, beta in enumerate(grid.betas):
            log_cutoff = kth_largest_margin(gaps[0], beta)
            n_kept, n_wrong = (sum(gap <= log_cutoff for gap in part) for part in gaps)
            usable = deployable(log_cutoff, rows[0] + rows[1])
            answers[i].append(Answer(log_cutoff, n_wrong / len(gaps[1]), usable, n_kept))
    return answers


def exact_answers(
    attacked: Tensor,
    attacked_labels: Tensor,
    clean: Tensor,
    labels: Tensor,
    std_pred: Tensor,
    grid: Grid,
    points: AttackedPoints | None = None,
) -> list[list[Answer]]:
    """As `paper_answers` for the exact criterion with the GELU clamp; the mixed classifier's classes are its argmax.

    `points` are further adversarial examples of the attacked images.
    """
    label_of, attacked_list = attacked_labels.tolist(), attacked.double().tolist()
    examples = list(zip(attacked_list, range(len(label_of)), label_of, strict=True))  # logits, image, class of `std`
    if points is not None:
        of_points = (points.rob_logits_PK.double(), points.image_P, points.std_pred_P)
        examples += zip(*(values.tolist() for values in of_points), strict=True)
    is_right = [top(row) == label for row, label in zip(attacked_list, label_of, strict=True)]
    before = [(layer_norm(row), image, std) for row, image, std in examples if is_right[image]]
    normed = [layer_norm(row) for row in clean.double().tolist()]
    answers: list[list[Answer]] = [[] for _ in grid.betas]
    for candidate in grid:
        attacked_rows = [mapped(row, *candidate) for row, _, _ in before]
        clean_rows = [mapped(row, *candidate) for row in normed]
        hardest: dict[int, Any] = {}
        for (row_before, image, std), row in zip(before, attacked_rows, strict=True):
            label = label_of[image]
            is_lead = top(row_before) == top(row) == label != std
            gap = log_one_minus_lead(row, label, std) if is_lead else log_one_minus_margin(row, label)
            hardest[image] = max(hardest.get(image, gap), gap)
        gaps = list(hardest.values())
        probs = [softmax(row) for row in clean_rows]
        rows = attacked_rows + clean_rows
        counted = [
            (log_cutoff, clean_count(probs, labels, std_pred, log_cutoff), sum(gap <= log_cutoff for gap in gaps))
            for log_cutoff in thresholds(gaps, clean_rows, std_pred.tolist())
        ]
        for i, beta in enumerate(grid.betas):
            lowest = kth_largest_margin(gaps, beta)
            allowed = [(count, kept, -log_cutoff) for log_cutoff, count, kept in counted if log_cutoff >= lowest]
            if lowest > 0:
                answers[i].append(Answer(lowest, math.nan, usable=False, kept=0))
                continue
            count, n_kept, negative = max(allowed)
            usable = deployable(-negative, rows)
            answers[i].append(Answer(-negative, count / len(probs), usable, n_kept))
    return answers


def thresholds(gaps: Row, clean_rows: list[Row], std_pred: list[int]) -> Row:
    """Every attacked image's log(1 - margin), and one value inside each interval on which no image changes sides."""
    clean = [log_one_minus_lead(row, top(row), k) for row, k in zip(clean_rows, std_pred, strict=True)]
    breaks = sorted({value for value in gaps + clean if value <= 0} | {mpmath.mpf(0)})
    inside = [(a + b) / 2 for a, b in itertools.pairwise(breaks)]
    return [value for value in gaps if value <= 0] + inside


def clean_count(probs: list[Row], labels: Tensor, std_pred: Tensor, log_cutoff: Any) -> int:
    """Count the images that the mixed classifier with this threshold gets right."""
    cutoff = -mpmath.expm1(log_cutoff)
    classes = [mixed_class(row, std, cutoff) for row, std in zip(probs, std_pred.tolist(), strict=True)]
    return sum(a == b for a, b in zip(classes, labels.tolist(), strict=True))


def softmax(row: Row) -> Row:
    highest = row[top(row)]
    weights = [mpmath.exp(value - highest) for value in row]
    total = mpmath.fsum(weights)
    return [weight / total for weight in weights]


def mixed_class(probs: Row, std: int, cutoff: Any) -> int:
    """The argmax of `alpha p + (1 - alpha) onehot(std)` with alpha = 1 / (1 + threshold)."""
    alpha = 1 / (1 + cutoff)
    return top([alpha * p + (1 - alpha) * (j == std) for j, p in enumerate(probs)])


def chosen(answers: list[Answer], grid: Grid, *, maximized: bool) -> tuple[float, float, float] | None:
    def rank(answer: Answer) -> tuple[float, ...]:
        return (-answer.objective, -answer.kept) if maximized else (answer.objective,)

    ranked = [
        ((*rank(answer), answer.log_cutoff, power, scale, abs(bias)), (scale, power, bias))
        for answer, (scale, power, bias) in zip(answers, grid, strict=True)
        if answer.usable
    ]
    return min(ranked, key=lambda entry: entry[0])[1] if ranked else None

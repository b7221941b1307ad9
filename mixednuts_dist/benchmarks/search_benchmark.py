"""Compare Algorithm 1 here with a plain loop over the candidates: the numbers and the time.

Both run in this process, in float64, with the same threads. The loop is timed on a sample of the candidates, because
every candidate costs the same.

Shapes: B images, K classes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mixing.transforms import layer_norm_logits
from ..selection.choice import published_grid
from ..selection.grid import Grid, kept_images
from ..selection.selection import Selection, select_parameters
from .attack_benchmark import say

N_ATTACKED, N_WRONG = 575, 210
BETAS = (1.0, 0.99, 0.985, 0.97, 0.9)
_Result = TypeVar("_Result")
_SAMPLED = 32  # candidates of the plain loop that are timed
_TOLD_APART = (1e-9, 1 - 1e-9)  # the plain loop rounds margin thresholds outside this range to 0 or 1
_REPEATS, _SECONDS = 3, 1.0  # minimum repetitions and duration; the fastest counts


@dataclass(frozen=True)
class Case:
    """Logits of one size and the paper's grid for it."""

    attacked_BK: Tensor
    wrong_BK: Tensor
    grid: Grid

    @classmethod
    def of(cls, n_classes: int, dataset: str) -> "Case":
        """Return synthetic logits: noise with one class lifted, more so in the attacked-and-correct ones."""
        generator = torch.Generator().manual_seed(n_classes)
        logits_BK = torch.randn(N_ATTACKED + N_WRONG, n_classes, generator=generator)
        lift_B = torch.rand(len(logits_BK), generator=generator) * 3 + math.sqrt(math.log(n_classes))
        lift_B[N_ATTACKED:] -= 1
        logits_BK[:, 0] += lift_B
        return cls(logits_BK[:N_ATTACKED], logits_BK[N_ATTACKED:], published_grid(dataset))

    def search(self) -> Selection:
        """Search the whole grid for all betas."""
        grid = self.grid
        return select_parameters(
            self.attacked_BK, self.wrong_BK, scales=grid.scales, powers=grid.powers, biases=grid.biases, betas=BETAS
        )


def run() -> dict[str, Any]:
    """Print one line per number of classes on stderr and return the numbers."""
    say(
        f"threads: {torch.get_num_threads()}; {N_ATTACKED} + {N_WRONG} images, 8 x 8 x 8 candidates, {len(BETAS)} betas"
    )
    results = {}
    for n_classes, dataset in ((10, "cifar10"), (100, "cifar100"), (1000, "imagenet")):
        results[f"K={n_classes}"] = result = _compare(Case.of(n_classes, dataset))
        say(
            f"K={n_classes}: plain loop {result['plain_s']:.3g} s, here {result['here_s']:.3g} s, "
            f"{result['ratio']:.0f} times as fast; thresholds differ by at most {result['largest_difference']:.1e}, "
            f"objectives by {result['objectives_that_differ']} of {result['objectives_compared']}"
        )
    return results


def _compare(case: Case) -> dict[str, Any]:
    here_s, selection = _fastest(case.search)
    sampled = _sampled_candidates(case.grid)
    normed = [layer_norm_logits(logits_BK.double()) for logits_BK in (case.attacked_BK, case.wrong_BK)]
    plain_s, found = _fastest(lambda: [_plain_candidate(normed, *values) for _, values in sampled])
    n_candidates = selection.objectives[0].numel()
    differences, n_differ = [], 0
    for (index, _), answers in zip(sampled, found, strict=True):
        for i, (log_gap, objective) in enumerate(answers):
            if not _TOLD_APART[0] < -math.expm1(log_gap) < _TOLD_APART[1]:
                continue
            differences.append(abs(float(selection.log_one_minus_cutoffs[i][index]) - log_gap))
            n_differ += objective != float(selection.objectives[i][index])
    plain_s *= n_candidates / len(sampled)
    return {
        "plain_s": plain_s,
        "here_s": here_s,
        "ratio": plain_s / here_s,
        "largest_difference": max(differences),
        "objectives_that_differ": n_differ,
        "objectives_compared": len(differences),
    }


def _plain_candidate(normed: list[Tensor], scale: float, power: float, bias: float) -> list[tuple[float, float]]:
    """Return (log(1 - threshold), objective) for every beta from probabilities and their top two."""
    margins = []
    for logits_BK in normed:
        v_BK = F.gelu(logits_BK + bias)
        probs_BK = (scale * v_BK.abs() ** power * v_BK.sign()).softmax(dim=1)
        top_B2 = probs_BK.topk(2, dim=1).values
        margins.append(top_B2[:, 0] - top_B2[:, 1])
    descending = margins[0].sort(descending=True).values
    cutoffs = [descending[kept_images(beta, N_ATTACKED) - 1] for beta in BETAS]
    return [(float(torch.log1p(-cutoff)), float((margins[1] >= cutoff).double().mean())) for cutoff in cutoffs]


def _sampled_candidates(grid: Grid) -> list[tuple[tuple[int, int, int], tuple[float, float, float]]]:
    shape = (len(grid.scales), len(grid.powers), len(grid.biases))
    flat = torch.arange(_SAMPLED) * (math.prod(shape) // _SAMPLED + 1) % math.prod(shape)  # all values of each axis
    indices: list[tuple[int, int, int]] = [
        (int(s), int(p), int(b)) for s, p, b in zip(*torch.unravel_index(flat, shape), strict=True)
    ]
    return [((s, p, b), (grid.scales[s], grid.powers[p], grid.biases[b])) for s, p, b in indices]


def _fastest(task: Callable[[], _Result]) -> tuple[float, _Result]:
    seconds: list[float] = []
    while len(seconds) < _REPEATS or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        result = task()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result

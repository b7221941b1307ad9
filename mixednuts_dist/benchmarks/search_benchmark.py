"""Compare the results and the time of Algorithm 1 here with those of a plain loop over the candidates.

Both run in this process, in float64, with the same threads. The loop is timed on a sample of the candidates and scaled
up, because every candidate costs the same.

Shapes: B images, K classes.
"""

import itertools
import math
import timeit
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mixing.transforms import layer_norm_logits
from ..selection.choice import published_grid
from ..selection.grid import kept_images
from ..selection.selection import select_parameters
from .attack_benchmark import say

N_ATTACKED, N_WRONG = 575, 210
BETAS = (1.0, 0.99, 0.985, 0.97, 0.9)
_SAMPLED = 32  # candidates of the plain loop that are timed
_TOLD_APART = (1e-9, 1 - 1e-9)  # the plain loop rounds margin thresholds outside this range to 0 or 1
_REPEATS = 5  # the fastest repetition counts


def run() -> dict[str, Any]:
    """Print one line per number of classes on stderr and return the numbers."""
    say(
        f"threads: {torch.get_num_threads()}; {N_ATTACKED} + {N_WRONG} images, 8 x 8 x 8 candidates, {len(BETAS)} betas"
    )
    results = {}
    for n_classes, dataset in ((10, "cifar10"), (100, "cifar100"), (1000, "imagenet")):
        results[f"K={n_classes}"] = result = _compare(n_classes, dataset)
        say(
            f"K={n_classes}: plain loop {result['plain_s']:.3g} s, here {result['here_s']:.3g} s, "
            f"{result['ratio']:.0f} times as fast; thresholds differ by at most {result['largest_difference']:.1e}, "
            f"objectives by {result['objectives_that_differ']} of {result['objectives_compared']}"
        )
    return results


def _compare(n_classes: int, dataset: str) -> dict[str, Any]:
    """Search the paper's grid for a dataset on synthetic logits, here and in the plain loop, and compare."""
    grid, logits_BK = published_grid(dataset), _made_up_logits(n_classes)
    attacked_BK, wrong_BK = logits_BK[:N_ATTACKED], logits_BK[N_ATTACKED:]
    axes: dict[str, Any] = {"scales": grid.scales, "powers": grid.powers, "biases": grid.biases}
    here = partial(select_parameters, attacked_BK, wrong_BK, **axes, betas=BETAS)
    every = list(itertools.product(*map(enumerate, axes.values())))
    sampled = [every[i * (len(every) // _SAMPLED + 1) % len(every)] for i in range(_SAMPLED)]  # all values of each axis
    normed = [layer_norm_logits(part_BK.double()) for part_BK in (attacked_BK, wrong_BK)]

    def plain() -> list[list[tuple[float, float]]]:
        return [_plain_candidate(normed, s, p, c) for (_, s), (_, p), (_, c) in sampled]

    here_s, plain_s = (min(timeit.repeat(task, number=1, repeat=_REPEATS)) for task in (here, plain))
    selection, differences, n_differ = here(), list[float](), 0
    for candidate, answers in zip(sampled, plain(), strict=True):
        at = tuple(index for index, _ in candidate)
        for i, (log_gap, objective) in enumerate(answers):
            if _TOLD_APART[0] < -math.expm1(log_gap) < _TOLD_APART[1]:
                differences.append(abs(float(selection.log_one_minus_cutoffs[i][at]) - log_gap))
                n_differ += objective != float(selection.objectives[i][at])
    plain_s *= len(every) / len(sampled)
    return {
        "plain_s": plain_s,
        "here_s": here_s,
        "ratio": plain_s / here_s,
        "largest_difference": max(differences),
        "objectives_that_differ": n_differ,
        "objectives_compared": len(differences),
    }


def _made_up_logits(n_classes: int) -> Tensor:
    """Return noise with one class lifted, more so in the first `N_ATTACKED` rows, (B, K)."""
    generator = torch.Generator().manual_seed(n_classes)
    logits_BK = torch.randn(N_ATTACKED + N_WRONG, n_classes, generator=generator)
    lift_B = torch.rand(len(logits_BK), generator=generator) * 3 + math.sqrt(math.log(n_classes))
    lift_B[N_ATTACKED:] -= 1
    logits_BK[:, 0] += lift_B
    return logits_BK


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

"""Compare the smoothed mixed classifier on the digits with other certified combinations of the same two networks.

Run `python -m benchmarks.certified_rivals --help`. Every row uses the same draws, and abstentions count as errors.

- **this package**: the standard classifier gets the clean image, and only the robust classifier votes under noise.
- **mixed classifier smoothed**: the votes are classes of the mixed classifier under noise (Cohen et al., 1902.02918).
  The standard classifier gets the noisy image too.
- **ACES** (Horvath et al., 2204.00487), a compositional architecture: a smoothed gate selects the smoothed robust
  classifier if most draws have a confidence margin above a threshold, and otherwise the standard classifier on the
  clean image. An image is certified up to the smaller of the radii of the gate and of the robust classifier. Each of
  the two has half of the allowed error.

Shapes: N draws or images, K classes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor

from mixednuts_dist.benchmarks.attack_benchmark import say
from mixednuts_dist.certification.smoothing import ROB_ALONE, SmoothedAnswers, SmoothingPlan, Votes, noisy
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import top2_margin
from mixednuts_dist.reports.table import Cell, Table

ALPHAS, THRESHOLDS, RADII = (1.0, 0.9, 0.8, 0.7, 0.6), (0.5, 0.8, 0.9, 0.95, 0.99), (0.1, 0.25, 0.5)
SIGMA, CONFIDENCE, N_CHOOSE, N_CLASSES = 0.25, 0.999, 100, 10


def run(n_images: int = 300, draws: int = 1000, model: str = "demo:noisy") -> Table:
    """Return one row per method and parameter: correct clean images, and certified images at each radius."""
    x, y = open_dataset("digits").read(0, n_images)
    std, rob = load_classifier("demo:std", "std"), load_classifier(model, "rob")
    votes = _votes(x, std, rob, draws)
    answers = {name: _answers(counts_N2K, y, std(x).argmax(dim=1)) for name, counts_N2K in votes.items()}
    rows = list[list[Cell]]()
    for alpha in ALPHAS:
        mixture = replace(ROB_ALONE, alpha=alpha, one_minus_alpha=1 - alpha)
        reach_N = answers["rob"].reach(mixture)
        rows.append(_row("this package", f"alpha {alpha:g}", answers["rob"].predicted(mixture), reach_N))
    for alpha in ALPHAS[1:]:
        whole = replace(answers[f"alpha {alpha:g}"], std_pred_N=None)
        reach_N = whole.reach(ROB_ALONE)
        rows.append(_row("mixed classifier smoothed", f"alpha {alpha:g}", whole.predicted(ROB_ALONE), reach_N))
    for threshold in THRESHOLDS:
        found = Composed(answers["rob"], answers[f"gate {threshold:g}"])
        rows.append(_row("ACES", f"margin {threshold:g}", found.correct(), found.reach()))
    return Table(["method", "parameter", "clean", *(f"certified at {radius:g}" for radius in RADII)], rows)


@dataclass(frozen=True)
class Composed:
    """The robust classifier and the gate that selects it, both smoothed; each has half of the allowed error."""

    rob: SmoothedAnswers
    gate: SmoothedAnswers  # class 0 selects the robust classifier, class 1 the standard one

    def correct(self) -> Tensor:
        """Return the images whose gate and selected class are settled and whose class is correct, (N,) bool."""
        gate_N, rob_N = (_settled(each) for each in self._halves())
        assert self.rob.std_pred_N is not None
        answer_N = torch.where(gate_N == 0, rob_N, self.rob.std_pred_N)
        correct_N: Tensor = (gate_N >= 0) & (answer_N == self.rob.labels_N)
        return correct_N

    def reach(self) -> Tensor:
        """Return the largest certified radius of each image, (N,), 0 for none."""
        gate, rob = self._halves()
        return torch.minimum(gate.reach(ROB_ALONE), rob.reach(ROB_ALONE))

    def _halves(self) -> tuple[SmoothedAnswers, SmoothedAnswers]:
        plan = replace(self.rob.plan, confidence=1 - (1 - CONFIDENCE) / 2)
        to_rob = replace(self.gate, plan=plan, labels_N=torch.zeros_like(self.gate.labels_N))
        return to_rob, replace(self.rob, plan=plan)


def _settled(answers: SmoothedAnswers) -> Tensor:
    std_NK = torch.zeros(answers.votes.counts_BK.shape, dtype=torch.float64)
    return answers.votes.settled_classes(std_NK, answers.plan.looks, ROB_ALONE)


@torch.no_grad()
def _votes(x: Tensor, std: torch.nn.Module, rob: torch.nn.Module, draws: int) -> Mapping[str, Tensor]:
    """Return the votes of `rob`, of each mixed classifier and of each gate, (N, 2, K).

    The second index separates draws that choose the class from draws that bound its vote.
    """
    found: dict[str, list[Tensor]] = {}
    for sample_id, image in enumerate(x):
        x_NCHW = noisy(image, SIGMA, 0, sample_id, 0, N_CHOOSE + draws)
        logits_NK = rob(x_NCHW)
        probs_NK, margin_N = logits_NK.double().softmax(dim=1), top2_margin(logits_NK)
        std_NK = torch.nn.functional.one_hot(std(x_NCHW).argmax(dim=1), N_CLASSES)
        classes = {"rob": probs_NK.argmax(dim=1)}
        classes |= {f"alpha {alpha:g}": ((1 - alpha) * std_NK + alpha * probs_NK).argmax(dim=1) for alpha in ALPHAS[1:]}
        classes |= {f"gate {threshold:g}": (margin_N <= threshold).long() for threshold in THRESHOLDS}
        for name, classes_N in classes.items():
            n_classes = 2 if name.startswith("gate") else N_CLASSES
            halves = classes_N.split([N_CHOOSE, draws])
            found.setdefault(name, []).append(torch.stack([half.bincount(minlength=n_classes) for half in halves]))
    return {name: torch.stack(counts) for name, counts in found.items()}


def _answers(counts_N2K: Tensor, y: Tensor, std_pred: Tensor) -> SmoothedAnswers:
    plan = SmoothingPlan(
        SIGMA, int(counts_N2K[0, 1].sum()), CONFIDENCE, N_CHOOSE, ALPHAS, RADII, stop_when_decided=False
    )
    return SmoothedAnswers(plan, y, std_pred, Votes(counts_N2K[:, 0], counts_N2K[:, 1]))


def _row(method: str, parameter: str, correct_N: Tensor, reach_N: Tensor) -> list[Cell]:
    return [method, parameter, int(correct_N.sum()), *(int((reach_N > radius).sum()) for radius in RADII)]


@click.command()
@click.option("-n", "n_images", type=int, default=300, help="Number of digits.")
@click.option("--draws", type=int, default=1000, help="Number of draws that bound a vote.")
@click.option("--model", metavar="URI", default="demo:noisy", help="Robust classifier of digits.")
def main(**options: Any) -> None:
    """Print a table of certified combinations to stderr and its rows as JSON to stdout."""
    table = run(**options)
    say(table.as_markdown())
    click.echo(json.dumps([dict(zip(table.columns, row, strict=True)) for row in table.rows], indent=2))


if __name__ == "__main__":
    main()

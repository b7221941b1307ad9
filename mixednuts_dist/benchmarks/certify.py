"""Certificates on the digits: ours against the published radius, and the draws that stopping early saves.

python -m mixednuts_dist.benchmarks.certify
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import click
import torch
from torch import Tensor

from ..certification.answers import ROB_ALONE, SmoothedAnswers
from ..certification.smoothing import SmoothingPlan, Votes, smoothed_votes
from ..classifiers.base_classifiers import load_classifier
from ..images.datasets import open_dataset
from ..mixing.certificates import published_radius
from ..reports.table import Cell, Table

ALPHAS, RADII = (1.0, 0.9, 0.8, 0.7), (0.1, 0.25, 0.5)
_ROWS = 256


def certificates(n_images: int, n: int, sigma: float = 0.25, confidence: float = 0.999) -> Iterator[tuple[str, Table]]:
    """The table of docs/certificates.md, then passes an image with and without early stops."""
    x, y = open_dataset("digits").read(0, n_images)
    rob, std_pred = load_classifier("demo:rob", "rob"), load_classifier("demo:std", "std")(x).argmax(dim=1)
    every = SmoothingPlan(sigma, n, confidence, 100, ALPHAS, RADII, stop_when_decided=False)
    asked = {"fixed": every, "all questions": replace(every, stop_when_decided=True)}
    asked["one question"] = replace(every, alphas=(0.8,), radii=(0.25,), stop_when_decided=True)
    rows: list[list[Cell]] = []
    for name, plan in asked.items():
        started = time.perf_counter()
        answers, votes = _answers(plan, x, y, std_pred, rob)
        seconds = time.perf_counter() - started
        certified = answers.certified(replace(ROB_ALONE, alpha=0.8, one_minus_alpha=0.2), 0.25)
        rows.append([name, votes.n_forward / len(x), seconds, int(certified.sum())])
        if name == "fixed":
            yield "Certified images", _table(answers, sigma)
    yield "Draws", Table(["draws", "passes an image", "seconds", "certified at alpha .8, r .25"], rows)


def _answers(
    plan: SmoothingPlan, x: Tensor, y: Tensor, std_pred: Tensor, rob: torch.nn.Module
) -> tuple[SmoothedAnswers, Votes]:
    with torch.no_grad():
        votes = smoothed_votes(rob, x, y, plan, n_classes=10, sample_ids=range(len(x)), seed=0, rows=_ROWS)
    return SmoothedAnswers(plan, y, std_pred, votes.chosen_counts_BK, votes.counts_BK, votes.n_drawn_B), votes


def _table(answers: SmoothedAnswers, sigma: float) -> Table:
    """Ours and the published radius by alpha."""
    votes_N = answers.votes()
    right_N = answers.radii(ROB_ALONE) > -torch.inf
    rows: list[list[Cell]] = []
    for alpha in ALPHAS:
        mixture = replace(ROB_ALONE, alpha=alpha, one_minus_alpha=1 - alpha)
        published_N = published_radius(votes_N, 1 - votes_N, sigma=sigma, alpha=alpha)
        ours = [int(answers.certified(mixture, radius).sum()) for radius in RADII]
        theirs = [int(((published_N > radius) & right_N).sum()) for radius in RADII]
        rows.append([f"{alpha:g}", int(answers.clean(mixture).sum()), *ours, *theirs])
    columns = [
        "alpha",
        "clean",
        *(f"at {radius:g}" for radius in RADII),
        *(f"published {radius:g}" for radius in RADII),
    ]
    return Table(columns, rows)


@click.command()
@click.option("--images", "n_images", default=899, show_default=True, help="of the digits")
@click.option("--n", default=1000, show_default=True, help="draws that bound a vote")
def main(n_images: int, n: int) -> None:
    """Certificates on the digits, ours against the published radius, and what stopping early saves."""
    for title, table in certificates(n_images, n):
        click.echo(f"{title}\n{table.as_markdown()}\n")


if __name__ == "__main__":
    main()

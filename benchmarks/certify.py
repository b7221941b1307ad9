"""Compare certificates on the digits with the published radius, and count the draws that stopping early saves.

Run `python -m benchmarks.certify --help`. The tables go to stderr, and all numbers as JSON to stdout.
"""

import json
import time
from dataclasses import replace
from typing import Any

import click
import torch
from torch import Tensor

from mixednuts_dist.benchmarks.attack_benchmark import say
from mixednuts_dist.certification.smoothing import ROB_ALONE, SmoothedAnswers, SmoothingPlan, smoothed_votes
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.mixture import Mixture
from mixednuts_dist.reports.table import Cell, Table

ALPHAS, RADII = (1.0, 0.9, 0.8, 0.7), (0.1, 0.25, 0.5)
SIGMA, CONFIDENCE = 0.25, 0.999
ASKED = (0.8, 0.25)  # alpha and radius of the single question
IMAGENET_IMAGES, IMAGENET_DRAWS = 5000, 10_000  # RobustBench's images; the usual draws
RESNET50_FLOPS = 8.2e9  # a forward pass at 224 x 224, a multiply-accumulate counted as two
ASSUMED_FLOPS = 50e12  # per second, an assumption: a third of an A100's peak in TF32
_ROWS = 256


def run(n_images: int = 899, draws: int = 1000, model: str = "demo:rob") -> dict[str, Any]:
    """Count certified images by alpha, passes per image with and without early stops, and GPU-hours for ImageNet.

    Args:
        n_images: number of digits.
        draws: maximum number of draws that bound a vote.
        model: the URI of the robust classifier.
    """
    x, y = open_dataset("digits").read(0, n_images)
    rob, std_pred = load_classifier(model, "rob"), load_classifier("demo:std", "std")(x).argmax(dim=1)
    every = SmoothingPlan(SIGMA, draws, CONFIDENCE, 100, ALPHAS, RADII, stop_when_decided=False)
    deciding = replace(every, stop_when_decided=True)
    plans = {
        "all": every,
        f"until decided at {len(ALPHAS)} alphas and {len(RADII)} radii": deciding,
        "until decided at one alpha and radius": replace(deciding, alphas=ASKED[:1], radii=ASKED[1:]),
    }
    found = {name: _drawn(plan, x, y, std_pred, rob) for name, plan in plans.items()}
    certified, saved = _certified(found["all"][0]), _saved(found)
    without_noise = int((rob(x).argmax(dim=1) == y).sum())
    say(f"{model}, {n_images} images: {without_noise} right without noise; sigma {SIGMA:g}, confidence {CONFIDENCE:g}")
    say(f"{certified.as_markdown()}\n\n{saved.as_markdown()}\n")
    imagenet = {
        name: _gpu_hours(each.votes.n_forward / (n_images * (100 + draws))) for name, (each, _) in found.items()
    }
    say(
        f"ImageNet, {IMAGENET_IMAGES:,} images, {IMAGENET_DRAWS:,} draws, a ResNet-50 at "
        f"{ASSUMED_FLOPS / 1e12:g} TFLOPS: "
        + ", ".join(f"{hours:.2f} GPU-hours ({name})" for name, hours in imagenet.items())
    )
    tables = {"certified": certified, "draws": saved}
    as_json = {name: [dict(zip(each.columns, row, strict=True)) for row in each.rows] for name, each in tables.items()}
    return {"right_without_noise": without_noise, **as_json, "imagenet_gpu_hours": imagenet}


def published_radius(p_top_B: Tensor, p_second_B: Tensor, *, sigma: float, alpha: float) -> Tensor:
    """Return the radius of adaptive smoothing (arXiv 2301.12554), for comparison, (B,) float64.

    The published certificate treats the vote of the standard classifier as part of one smoothed probability, so its
    radius is `sigma / 2 [Phi^-1(a p_A) - Phi^-1(a p_B + 1 - a)]`. It is at most `sigma Phi^-1(a)`, and never larger
    than `certified_radius`, which is the largest radius that follows from p_A and p_B.

    >>> published_radius(torch.tensor([1.0]), torch.tensor([0.0]), sigma=0.25, alpha=0.8)  # the largest one
    tensor([0.2104], dtype=torch.float64)
    """
    mixed_top_B, mixed_second_B = alpha * p_top_B.double(), alpha * p_second_B.double() + (1 - alpha)
    radius_B: Tensor = 0.5 * sigma * (torch.special.ndtri(mixed_top_B) - torch.special.ndtri(mixed_second_B))
    return radius_B


def _drawn(
    plan: SmoothingPlan, x: Tensor, y: Tensor, std_pred: Tensor, rob: torch.nn.Module
) -> tuple[SmoothedAnswers, float]:
    started = time.perf_counter()
    with torch.no_grad():
        votes = smoothed_votes(rob, x, y, plan, n_classes=10, sample_ids=range(len(x)), seed=0, rows=_ROWS)
    return SmoothedAnswers(plan, y, std_pred, votes), time.perf_counter() - started


def _certified(answers: SmoothedAnswers) -> Table:
    """Return a table of images that are certified by our radius and by the published one."""
    bounds, rows = answers.bounds, list[list[Cell]]()
    chosen_N = answers.votes.classes == answers.labels_N
    for alpha in ALPHAS:
        mixture = _mixture(alpha)
        published_N = published_radius(*bounds, sigma=SIGMA, alpha=alpha)
        ours = [int(answers.certified(mixture, radius).sum()) for radius in RADII]
        theirs = [int(((published_N > radius) & chosen_N).sum()) for radius in RADII]
        clean = [int(right_N.sum()) for right_N in (answers.clean(mixture), answers.predicted(mixture))]
        rows.append([alpha, *clean, *ours, *theirs])
    columns = [
        "alpha",
        "clean",
        "abstentions as errors",
        *(f"{whose} {radius:g}" for whose in ("at", "published") for radius in RADII),
    ]
    return Table(columns, rows)


def _saved(found: dict[str, tuple[SmoothedAnswers, float]]) -> Table:
    alpha, radius = ASKED
    rows: list[list[Cell]] = [
        [name, each.votes.n_forward / len(each.labels_N), seconds, int(each.certified(_mixture(alpha), radius).sum())]
        for name, (each, seconds) in found.items()
    ]
    return Table(["draws", "passes per image", "seconds", f"certified at alpha {alpha:g}, r {radius:g}"], rows)


def _mixture(alpha: float) -> Mixture:
    return replace(ROB_ALONE, alpha=alpha, one_minus_alpha=1 - alpha)


def _gpu_hours(share: float) -> float:
    """Return the GPU-hours for ImageNet if its images need the same share of all draws as the digits."""
    return share * IMAGENET_IMAGES * (100 + IMAGENET_DRAWS) * RESNET50_FLOPS / ASSUMED_FLOPS / 3600


@click.command()
@click.option("-n", "n_images", type=int, default=899, help="Number of digits.")
@click.option("--draws", type=int, default=1000, help="Maximum number of draws that bound a vote.")
@click.option("--model", metavar="URI", default="demo:rob")
def main(**options: Any) -> None:
    """Certify digits with and without early stops."""
    click.echo(json.dumps(run(**options), indent=2))


if __name__ == "__main__":
    main()

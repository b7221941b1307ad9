"""Attack certified digits within their certified radius with AutoAttack in L2, and count certificates that fail.

Run `python -m benchmarks.certified_attack --help`. The attack sees a mixed classifier whose robust part is averaged
over a few fixed draws of the noise. This network is deterministic, and its gradient takes all these draws into account.
New draws at the adversarial examples then test the certificates. A certificate fails if, for some class of the standard
classifier, the smoothed mixed classifier no longer predicts the label.
"""

import json
from dataclasses import replace
from typing import Any

import click
import torch
from torch import Tensor, nn

from mixednuts_dist import AttackBudget, MixedClassifier, ThreatModel, autoattack, load_classifier, open_dataset
from mixednuts_dist.certification.confidence import top_and_second
from mixednuts_dist.certification.smoothing import ROB_ALONE, SmoothedAnswers, SmoothingPlan, smoothed_votes
from mixednuts_dist.mixing.transforms import IdentityTransform

ALPHA, SIGMA, CONFIDENCE, N_CHOOSE = 0.8, 0.25, 0.999, 100
VERIFICATION_DRAWS, ROWS = 2000, 256


class Averaged(nn.Module):
    """A classifier that returns the logs of its probabilities, averaged over fixed draws of noise."""

    def __init__(self, rob: nn.Module, n_draws: int) -> None:
        super().__init__()
        self.rob, self.noise = rob, SIGMA * torch.randn(n_draws, 1, 1, 8, 8, generator=torch.Generator().manual_seed(7))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        probs_BK = self.rob((x_BCHW + self.noise).flatten(0, 1)).softmax(dim=1)
        logits_BK: Tensor = probs_BK.unflatten(0, (len(self.noise), len(x_BCHW))).mean(dim=0).log()
        return logits_BK


def run(
    n_images: int = 899,
    draws: int = 1000,
    model: str = "demo:noisy",
    radius: float = 0.25,
    averaged: int = 4,
    n_iter: int = 10,
    n_targets: int = 2,
    n_queries: int = 50,
) -> dict[str, int]:
    """Return how many digits are certified at `radius`, broken on the averaged network, and contradicted.

    Args:
        n_images: number of digits.
        draws: number of draws that bound a vote.
        model: the URI of the robust classifier.
        radius: L2 radius of the certificates and of the attack.
        averaged: number of draws in the network that is attacked.
        n_iter: iterations of APGD-CE, and per target of APGD-T and FAB-T.
        n_targets: target classes of APGD-T and FAB-T.
        n_queries: queries of Square.
    """
    x, y = open_dataset("digits").read(0, n_images)
    std, rob = load_classifier("demo:std", "std"), load_classifier(model, "rob")
    plan = SmoothingPlan(SIGMA, draws, CONFIDENCE, N_CHOOSE, (ALPHA,), (radius,))
    drawn = smoothed_votes(rob, x, y, plan, n_classes=10, sample_ids=range(n_images), seed=0, rows=ROWS)
    certified_N = SmoothedAnswers(plan, y, None, drawn).certified(
        replace(ROB_ALONE, alpha=ALPHA, one_minus_alpha=1 - ALPHA), radius
    )
    x, y = x[certified_N], y[certified_N]
    attacked = autoattack(
        MixedClassifier(std, Averaged(rob, averaged), IdentityTransform(), ALPHA), x, y,
        threat=ThreatModel("L2", radius), budget=AttackBudget(n_iter, n_targets, n_queries), precision="fp32",
    )  # fmt: skip
    fixed = replace(plan, n=VERIFICATION_DRAWS, stop_when_decided=False)
    new_ids = range(n_images, n_images + len(x))  # other noise than the certificates had
    votes = smoothed_votes(rob, attacked.x_adv, y, fixed, n_classes=10, sample_ids=new_ids, seed=1, rows=ROWS)
    own_N, others_N = (hits_N.double() / VERIFICATION_DRAWS for hits_N in top_and_second(votes.counts_BK, y))
    failed_N = ALPHA * own_N <= 1 - ALPHA + ALPHA * others_N  # for the worst class of the standard classifier
    return {
        "certified": len(x),
        "moved": int((attacked.x_adv != x).flatten(1).any(dim=1).sum()),
        "broken_on_the_average": int((~attacked.robust).sum()),
        "contradicted": int(failed_N.sum()),
    }


@click.command()
@click.option("-n", "n_images", type=int, default=899, help="Number of digits.")
@click.option("--draws", type=int, default=1000, help="Number of draws that bound a vote.")
@click.option("--model", metavar="URI", default="demo:noisy", help="Robust classifier of digits.")
@click.option("--radius", type=float, default=0.25, help="L2 radius of the certificates and of the attack.")
@click.option("--averaged", type=int, default=4, help="Number of draws in the network that is attacked.")
@click.option("--n-iter", type=int, default=10, help="Iterations of APGD and FAB.")
@click.option("--n-targets", type=int, default=2, help="Target classes of APGD-T and FAB-T.")
@click.option("--n-queries", type=int, default=50, help="Queries of Square.")
def main(**options: Any) -> None:
    """Attack certified digits within their radius, and print the counts as JSON."""
    click.echo(json.dumps(run(**options), indent=2))


if __name__ == "__main__":
    main()

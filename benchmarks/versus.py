"""Compare the CPU time of some attacks here and in pyautoattack, in alternation in one process.

    python -m benchmarks.versus --model py:zoo.py:rob_c10_resnet4b --data DATASET --eps 2/255 -n 100

All attacks run in one thread. CPU time is measured, because other processes affect it less than wall time. `--first`
skips images that were used for tuning.
"""

import time

import click
import torch

from mixednuts_dist.attacks.budget import STANDARD_ATTACKS
from mixednuts_dist.attacks.published import pyautoattack_images
from mixednuts_dist.benchmarks.attack_benchmark import PUBLISHED_BUDGET, attacked_here, differentiable
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.section import read_fraction
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset


def compare(
    model: str, data: str, *, threat: ThreatModel, first: int, n: int, attacks: tuple[str, ...], rounds: int
) -> None:
    """Print the CPU seconds and robust images of both packages, one line per round."""
    network, (x, y) = load_classifier(model, "rob"), open_dataset(data).read(first, first + n)
    for _ in range(rounds):
        started = time.process_time()
        theirs, _, _ = pyautoattack_images(
            differentiable(network), x, y, threat=threat, budget=PUBLISHED_BUDGET, seed=0, batch_size=n, attacks=attacks
        )
        turned = time.process_time()
        here = attacked_here(network, x, y, threat=threat, attacks=attacks, budget=PUBLISHED_BUDGET)
        ended = time.process_time()
        with torch.no_grad():
            robust = network(theirs).argmax(dim=1) == y
        seconds = turned - started, ended - turned
        click.echo(
            {
                "pyautoattack": seconds[0],
                "here": seconds[1],
                "ratio": seconds[0] / seconds[1],
                "robust": (int(robust.sum()), int(here.robust.sum())),
                "broken by pyautoattack only": int((here.robust & ~robust).sum()),
            }
        )


@click.command(help=__doc__)
@click.option("--model", required=True)
@click.option("--data", required=True)
@click.option("--threat", default="Linf", show_default=True)
@click.option("--eps", default="2/255", show_default=True)
@click.option("--first", default=500, show_default=True)
@click.option("-n", "n", default=100, show_default=True)
@click.option("--attacks", default="apgd-ce,apgd-t", show_default=True, help="'standard' for whole AutoAttack.")
@click.option("--rounds", default=3, show_default=True)
def main(model: str, data: str, threat: str, eps: str, first: int, n: int, attacks: str, rounds: int) -> None:
    torch.set_num_threads(1)
    names = STANDARD_ATTACKS if attacks == "standard" else tuple(attacks.split(","))
    ball = ThreatModel(threat, float(str(read_fraction(eps))))
    compare(model, data, threat=ball, first=first, n=n, attacks=names, rounds=rounds)


if __name__ == "__main__":
    main()

"""Compare the time of some attacks here and in pyautoattack, in alternation in one process.

    python -m benchmarks.versus --model py:zoo.py:rob_c10_resnet4b --data DATASET --eps 2/255 -n 100

On a CPU, all attacks run in one thread, and CPU time is measured, because other processes affect it less than wall
time. On a GPU (`--device cuda`), wall time is measured, and `--tf32` lets pyautoattack use TF32, as it does by default.
`--first` skips images that were used for tuning.
"""

import time
from dataclasses import replace
from typing import Any

import click
import torch

from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.budget import STANDARD_ATTACKS
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.benchmarks.attack_benchmark import PUBLISHED_BUDGET, attacked_here, differentiable
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.section import read_fraction
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.stages.published import pyautoattack_images


def compare(
    model: str, data: str, *, threat: ThreatModel, first: int, n: int, attacks: tuple[str, ...], rounds: int,
    n_iter: int = 100, device: str = "cpu", tf32: bool = False,
) -> None:  # fmt: skip
    """Print the seconds and robust images of both packages, one line per round."""
    network = load_classifier(model, "rob").to(device)
    x, y = (values.to(device) for values in open_dataset(data).read(first, first + n))
    budget = replace(PUBLISHED_BUDGET, n_iter=n_iter)

    def now() -> float:
        if not x.is_cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(rounds):
        started = now()
        theirs, _, _ = pyautoattack_images(
            differentiable(network), x, y, threat=threat, budget=budget, seed=0, batch_size=n, attacks=attacks,
            strict=not tf32,
        )  # fmt: skip
        turned = now()
        here = attacked_here(network, x, y, threat=threat, attacks=attacks, budget=budget)
        ended = now()
        robust = Verifier(network, BatchShape(n)).logits(theirs).argmax(dim=1) == y
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
@click.option("--n-iter", default=100, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--tf32", is_flag=True)
def main(model: str, data: str, threat: str, eps: str, attacks: str, **options: Any) -> None:
    torch.set_num_threads(1)
    names = STANDARD_ATTACKS if attacks == "standard" else tuple(attacks.split(","))
    ball = ThreatModel(threat, float(str(read_fraction(eps))))
    compare(model, data, threat=ball, attacks=names, **options)


if __name__ == "__main__":
    main()

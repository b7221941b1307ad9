"""Passes of a radius curve against those of separate attacks at each radius, and the counts of both.

Run: `mixednuts benchmark radii`. The table goes to stderr, all numbers as JSON to stdout.
"""

import sys
from typing import Any

from ..acceleration.batch_shape import BatchShape
from ..attacks.budget import AttackBudget
from ..attacks.radius_curve import radius_curve
from ..classifiers.base_classifiers import load_classifier
from ..config.threat import ThreatModel
from ..images.datasets import open_dataset
from ..reports.table import Cell, Table

ATTACKS = ("apgd-ce", "apgd-t")
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the largest radius, as 1/255, 2/255, 4/255 and 8/255
_ROWS = 64


def run(n_images: int = 200, model: str = "demo:rob", data: str = "digits", eps: float = 0.12) -> dict[str, Any]:
    """Four radii, at 1/8, 1/4, 1/2 and 1 of `eps` in Linf, under APGD-CE and APGD-T with 50 iterations and 4 targets.

    Args:
        n_images: the first of `data`.
        model, data: URIs.
        eps: the largest radius.
    """
    network, (x, y) = load_classifier(model, "rob"), open_dataset(data).read(0, n_images)
    threats = [ThreatModel("Linf", share * eps) for share in SHARES]

    def passes(*threats: ThreatModel) -> tuple[list[int], int]:
        found = radius_curve(
            network, x, y, threats=threats, attacks=ATTACKS, budget=AttackBudget(n_iter=50, n_target_classes=4),
            shape=BatchShape(_ROWS),
        )  # fmt: skip
        return found.robust.sum(dim=0).tolist(), found.n_forward + found.n_backward

    (counts, together), alone = passes(*threats), [passes(threat) for threat in threats]
    rows: list[list[Cell]] = [
        [f"{threat.eps:g}", curve, separate, n_passes / n_images]
        for threat, curve, (count, n_passes) in zip(threats, counts, alone, strict=True)
        for separate in count
    ]
    table = Table(["eps", "robust, curve", "robust, separate", "passes an image, separate"], rows)
    apart, largest, dearest = sum(n for _, n in alone), alone[-1][1], max(n for _, n in alone)
    print(
        f"{table.as_markdown()}\n\nthe curve: {together / n_images:.1f} passes an image, {together / largest:.2f} "
        f"times the largest radius alone, {together / dearest:.2f} times the dearest one (no curve takes much less: "
        f"each image that it counts as standing has withstood one whole attack), {together / apart:.2f} times all",
        file=sys.stderr,
    )
    return {
        "radii": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
        "passes": {"curve": together, "separate": apart, "largest_alone": largest},
        "of_largest": together / largest,
        "of_dearest": together / dearest,
        "of_separate": together / apart,
    }

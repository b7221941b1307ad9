"""A study of common corruptions: whether the mixture keeps std's side or rob's under shift."""

from typing import Any

from ..config.register import STUDIES
from ..images.corruptions import SEVERITIES
from ..reports.charts import lines as line_chart
from ..reports.table import Table
from ..stages.stage import stage_of
from .bench import Bench
from .study import Outcome


@STUDIES(
    "corruptions",
    describes="Common corruptions: whose accuracy does the mixture keep?",
    section="not in the paper",
    order=40,
)
def corruptions(bench: Bench) -> Outcome:
    """Accuracy over the severity of std, rob and the mixture, averaged over the corruptions.

    Raises:
        InvalidInputError: for a run whose configuration has no key `corruptions`.
    """
    stage: Any = stage_of(bench.config, "corruptions")
    stage.complete(bench.run, bench.executor, bench.progress)
    clean, right_MCSN = stage.right(bench.run)
    accuracy = {
        name: [100 * float(hits.double().mean()) for hits in (clean_N, *right_CSN.unbind(dim=1))]
        for (name, clean_N), right_CSN in zip(clean.items(), right_MCSN, strict=True)
        if name in ("std", "rob", "mixed")
    }
    columns = ("classifier", "clean (%)", *(f"severity {severity} (%)" for severity in SEVERITIES))
    table = Table(columns, [(name, *(round(each, 1) for each in values)) for name, values in accuracy.items()])
    points = [
        {"x": severity, "y": value, "series": name}
        for name, values in accuracy.items()
        for severity, value in enumerate(values)
    ]
    figure = line_chart(points, x="severity (0: clean)", y="accuracy, mean of the corruptions (%)")
    means = {name: sum(values[1:]) / len(SEVERITIES) for name, values in accuracy.items()}
    nearer = min(("std", "rob"), key=lambda name: abs(means[name] - means["mixed"]))
    by_corruption = right_MCSN[:3].double().mean(dim=(2, 3))
    at_least = int((by_corruption[2] >= by_corruption[:2].amax(dim=0)).sum())
    findings = (
        "Corrupted, mean of all: " + ", ".join(f"{name} {value:.1f} %" for name, value in means.items())
        + f". The mixture is nearer to {nearer}.",
        f"On {at_least} of {right_MCSN.shape[1]} corruptions the mixture is right at least as often as the better of "
        "its two classifiers.",
    )  # fmt: skip
    return Outcome(table, figure, findings)

"""The charts of a run, by their names in the register `CHARTS`.

An entry is a function that receives the results of a run and returns a `Figure`, or None if the run lacks the data. A
chart from your own file appears on the page after the charts of this module, and is also written as a PDF.
"""

from ..config.register import CHARTS, CRITERIA
from .charts import accuracy_scatter, bars, lines, maps
from .counts import Count
from .drawing import CLASSIFIER_COLORS, CLASSIFIER_MARKS, PALETTE, Figure, Row
from .margins import split_histograms
from .results import RunResults, kept_by_rounds, predicted

_PREDICTED, _ROUNDS = "predicted", "refinement rounds"
_MARKS = {
    **CLASSIFIER_MARKS,
    _PREDICTED: ("stroke", CLASSIFIER_COLORS["mixed"]),
    _ROUNDS: ("diamond", PALETTE[3]),
}


def figures(results: RunResults) -> dict[str, Figure]:
    """Return every registered chart for which the run has data, by name."""
    made = {name: CHARTS.get(name)(results) for name in CHARTS.names()}
    return {name: figure for name, figure in made.items() if figure is not None}


def caption(name: str) -> str:
    """Return the caption of a figure."""
    entry = CHARTS.entries()[name]
    return str(entry.facts.get("caption", entry.describes))


@CHARTS(
    "tradeoff",
    caption="Dots show what the search predicts for every beta. Marks with whiskers were measured under attack, with "
    "95% intervals. The second panel enlarges the dashed frame.",
    order=1,
)
def tradeoff(results: RunResults) -> Figure | None:
    """Draw clean against robust accuracy, predicted for every beta and measured."""
    if results.found is None:
        return None
    by_beta = results.search.by_beta()
    measured = {row.classifier: [(row.classifier, row.clean, row.robust)] for row in results.accuracy}
    other_betas = [
        (f"β {beta:g}", predicted(by_beta[beta])[0], Count(kept.correct, results.n_searched))
        for beta, kept in kept_by_rounds(results.search).items()
        if beta != results.parameters.beta
    ]
    curve = [(clean.percent, robust.percent) for clean, robust in map(predicted, results.search.entries)]
    return accuracy_scatter(
        {**measured, **({_ROUNDS: other_betas} if other_betas else {})},
        curves={_PREDICTED: curve},
        marks=_MARKS,
        called=results.names,
        enlarged=("rob", "mixed", _ROUNDS),
    )


@CHARTS(
    "margins",
    caption="Margins of images that are correct under attack (bars) and of clean images that are wrong (outline), for "
    "rob as it is, after LayerNorm, and after M. The line is the margin threshold: the mixed classifier follows rob to "
    "its right and the standard classifier to its left.",
    order=2,
)
def margins(results: RunResults) -> Figure | None:
    """Draw the margins of the robust classifier, and the images that the threshold separates."""
    return split_histograms(results.splits, results.distances) if results.splits else None


@CHARTS(
    "sensitivity",
    caption="The objective of the search over scale s and bias c, one map for each power p, at the deployed beta. "
    "Darker is better. The ring is the selected candidate; × marks candidates that cannot be used.",
    order=3,
)
def sensitivity(results: RunResults) -> Figure | None:
    """Draw the objective over s and c, for each p."""
    if not results.candidates:
        return None
    criterion = CRITERIA.get(results.search.criterion)
    objectives = {
        (row["scale"], row["power"], row["bias"]): row["objective"] if row["feasible"] and row["deployable"] else None
        for row in results.candidates
    }
    return maps(objectives, chosen=results.parameters.at, meaning=criterion.meaning, maximized=criterion.maximized)


@CHARTS(
    "survival",
    caption="Images that are still correct after each step, and how many of them the step broke. Each step attacks "
    "only the images that remain.",
    order=4,
)
def survival(results: RunResults) -> Figure:
    """Draw the images that remain robust after each step of the attack."""
    rows = [
        {
            "name": step.step,
            "value": step.percent,
            "label": f"{step.correct}" + (f" (−{step.lost})" if step.lost and number else ""),
        }
        for number, step in enumerate(results.survival)
    ]
    return bars(rows, value="correct after this step (%)", within=(0.0, 100.0))


@CHARTS(
    "certified",
    caption="Left: for every beta, clean accuracy and robustness under the stored adversarial examples, both "
    "predicted, and what is certified at each radius. Right: what is certified of rob alone and of the deployed mixed "
    "classifier as the radius grows and, if the norms agree, what the attack left of the mixed classifier.",
    order=5,
)
def certified(results: RunResults) -> Figure | None:
    """Draw certified and attacked accuracy over beta and over the radius."""
    found = results.certified
    if found is None or results.found is None:
        return None
    by_radius = [
        {"x": radius, "y": Count(n, found.total).percent, "series": f"{name}, certified"}
        for name, steps in found.by_radius.items()
        for radius, n in steps
    ]
    if results.threat.norm == "L2":
        attacked = results.row("mixed").robust.percent
        by_radius.append({"x": results.threat.eps, "y": attacked, "series": "mixed, attacked"})
    over_beta, last = list[Row](), len(found.radii) - 1
    for entry in sorted(results.search.entries, key=lambda entry: entry.beta):
        counts = dict(zip(("clean", "attacked"), predicted(entry), strict=True))
        for at in sorted({0, last // 2, last} if last > 2 else range(last + 1)):
            counts[f"certified at {found.radii[at]:g}"] = Count(found.by_beta[entry.beta][at], found.total)
        over_beta += [{"x": entry.beta, "y": count.percent, "series": name} for name, count in counts.items()]
    charts = lines(over_beta, x="beta", y="images (%)"), lines(by_radius, x="L2 radius", y="images (%)")
    return Figure([panel for chart in charts for panel in chart.panels])

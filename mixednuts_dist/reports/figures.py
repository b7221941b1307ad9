"""The charts of a run, by their names in the register `CHARTS`.

An entry is a function from a run's results to a `Figure`, or to None if the run has nothing for it. A chart from your
own file appears on the page after these, and as a PDF next to it.
"""

from collections.abc import Mapping

from ..config.register import CHARTS, CRITERIA
from .charts import accuracy_axes, bars, lines, maps, point, scatter_panel, window
from .counts import Count, percent_text
from .drawing import CLASSIFIER_COLORS, CLASSIFIER_MARKS, PALETTE, Figure, Row, Span, Spec, beside, called, key, layer
from .margins import split_histograms
from .results import RunResults, kept_by_rounds, parameter_values, predicted

_PREDICTED, _ROUNDS = "predicted", "refinement rounds"
_MARKS = {
    **CLASSIFIER_MARKS,
    _PREDICTED: ("stroke", CLASSIFIER_COLORS["mixed"]),
    _ROUNDS: ("diamond", PALETTE[3]),
}


def figures(results: RunResults) -> dict[str, Figure]:
    """Return every registered chart that the run has something for, by name."""
    made: Mapping[str, Figure | None] = {name: CHARTS.get(name)(results) for name in CHARTS.names()}
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
    curve, marks = _curve(results), _measured_marks(results)
    names = [name for name in _MARKS if name in {_PREDICTED, *(mark["series"] for mark in marks)}]
    close = _close_window(curve, marks)
    left = min([*(mark["clean_low"] for mark in marks), *(step["clean"] for step in curve)])
    whole = (max(0.0, left - 4), 100.0), (0.0, 100.0)
    panels = [
        scatter_panel(
            marks, {_PREDICTED: curve}, key(names, _MARKS, legend=span is whole, **called(results.names)), span,
            layers=[_dots(curve, span), *([_frame(close)] if span is whole else [])],
        )
        for span in (whole, close)
    ]  # fmt: skip
    return Figure(panels, _tradeoff_words(results))


def _curve(results: RunResults) -> list[Row]:
    return [{**parameter_values(entry), **point(_PREDICTED, "", *predicted(entry))} for entry in results.search.entries]


def _measured_marks(results: RunResults) -> list[Row]:
    """Return the base and mixed classifiers, and what the refinement rounds measured at other betas."""
    own = [point(row.classifier, row.classifier, row.clean, row.robust) for row in results.accuracy]
    by_beta = {entry.beta: entry for entry in results.search.entries}
    rounds = [
        point(_ROUNDS, f"β {beta:g}", predicted(by_beta[beta])[0], Count(kept.correct, results.n_searched))
        for beta, kept in kept_by_rounds(results.search).items()
        if beta != results.parameters.beta
    ]
    return [*own, *rounds]


def _close_window(curve: list[Row], marks: list[Row]) -> tuple[Span, Span]:
    """Return a window with `rob`, `mixed`, their intervals, and the curve down to 10 points below them."""
    near = [mark for mark in marks if mark["series"] != "std"]
    floor = min(mark["robust_low"] for mark in near) - 10
    steps = [{"clean": step["clean"], "robust": step["robust"]} for step in curve if step["robust"] >= floor]
    return window([*near, *steps])


def _dots(curve: list[Row], shown: tuple[Span, Span]) -> Spec:
    """Draw every beta as a dot."""
    x, y = accuracy_axes(shown)
    return layer("circle", curve, {"x": x, "y": y}, clip=True, size=26, opacity=1, color=CLASSIFIER_COLORS["mixed"])


def _frame(close: tuple[Span, Span]) -> Spec:
    (left, right), (bottom, top) = close
    corners = [{"clean": left, "clean_to": right, "robust": bottom, "robust_to": top}]
    sides = {"x": {"field": "clean", "type": "quantitative"}, "x2": {"field": "clean_to"},
             "y": {"field": "robust", "type": "quantitative"}, "y2": {"field": "robust_to"}}  # fmt: skip
    return layer("rect", corners, sides, fillOpacity=0, stroke="#8b929b", strokeDash=[3, 3], strokeWidth=1)


def _tradeoff_words(results: RunResults) -> str:
    def pair(clean: Count, robust: Count) -> str:
        return f"{percent_text(clean)}% clean and {percent_text(robust)}% robust"

    first, last = results.search.entries[0], results.search.entries[-1]
    measured = ", ".join(f"{row.classifier} {pair(row.clean, row.robust)}" for row in results.accuracy)
    return (
        f"Clean against robust accuracy. Measured: {measured}. The predicted curve runs from {pair(*predicted(first))} "
        f"at beta {first.beta:g} to {pair(*predicted(last))} at beta {last.beta:g}."
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
    if not results.splits:
        return None
    said = [
        f"{split.form}: {split.kept.correct} of {split.kept.total} attacked and correct images at or above the "
        f"threshold, {split.left_to_std.correct} of {split.left_to_std.total} clean and wrong ones below it"
        for split in results.splits
    ]
    return split_histograms(results.splits).described(f"Histograms of margins. {'; '.join(said)}.")


@CHARTS(
    "sensitivity",
    caption="The objective of the search over scale s and bias c, one map for each power p, at the deployed beta. "
    "Darker is better. The ring is the selected candidate; × marks candidates that cannot be used.",
    order=3,
)
def sensitivity(results: RunResults) -> Figure | None:
    """Draw the objective over s and c, for each p."""
    rows = sensitivity_rows(results) if results.candidates else []
    if not rows:
        return None
    chosen, criterion = results.parameters, CRITERIA.get(results.search.criterion)
    meaning = f"{criterion.meaning} (%)"
    found = [float(row["objective"]) for row in rows if row["objective"] is not None]
    span = f"between {min(found):.1f}% and {max(found):.1f}%" if found else "nowhere defined"
    return maps(rows, meaning=meaning, maximized=criterion.maximized).described(
        f"Maps of the objective, {meaning}, over scale s and bias c, one per power p, at beta {chosen.beta:g}. Over "
        f"{len(rows)} candidates, {len(found)} of which can be used, it lies {span}. Selected: s {chosen.scale:.4g}, "
        f"p {chosen.power:.4g}, c {chosen.bias:.4g}."
    )


def sensitivity_rows(results: RunResults) -> list[Row]:
    """Return every candidate at the deployed beta: s, p, c, selected, and the objective in percent or None."""
    chosen = results.parameters
    return [
        {
            "s": row["scale"],
            "p": row["power"],
            "c": row["bias"],
            "objective": 100 * row["objective"] if row["feasible"] and row["deployable"] else None,
            "selected": (row["scale"], row["power"], row["bias"]) == (chosen.scale, chosen.power, chosen.bias),
        }
        for row in results.candidates
    ]


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
    steps = ", ".join(f"{step.step} {step.correct}" for step in results.survival)
    words = f"Of {results.n_images} images, those that are correct after each step: {steps}."
    return bars(rows, value="correct after this step (%)", within=(0.0, 100.0)).described(words)


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
    if found.norm == results.threat.norm:
        attacked = results.row("mixed").robust.percent
        by_radius.append({"x": results.threat.eps, "y": attacked, "series": "mixed, attacked"})
    places = range(len(found.radii))
    places = places if len(places) <= 3 else [0, len(places) // 2, len(places) - 1]  # type: ignore[assignment]
    radii, over_beta = list(found.radii.values()), list[Row]()
    for entry in sorted(results.search.entries, key=lambda entry: entry.beta):
        clean, kept = predicted(entry)
        counts = {"clean": clean, "attacked": kept}
        counts |= {f"certified at {radii[at]}": Count(found.by_beta[entry.beta][at], found.total) for at in places}
        over_beta += [{"x": entry.beta, "y": count.percent, "series": name} for name, count in counts.items()]
    each = ", ".join(
        f"{percent_text(Count(n, found.total))}% at {words}"
        for words, n in zip(radii, found.by_beta[results.parameters.beta], strict=True)
    )
    return beside(
        lines(over_beta, x="beta", y="images (%)"), lines(by_radius, x=f"{found.norm} radius", y="images (%)")
    ).described(f"Certified images over beta and over the {found.norm} radius. The deployed mixed classifier: {each}.")

"""The charts of a run, by their names in the register `CHARTS`.

An entry is a function from a run's results to a chart, or to None where the run has nothing for it. A chart of a
user's file appears on the page after these, and as files beside it.
"""

from collections.abc import Mapping
from typing import Any

import altair as alt

from ..config.register import CHARTS, CRITERIA
from .charts import bars, beside, lines, maps
from .counts import Count, percent_text
from .drawing import (
    CLASSIFIER_COLOURS,
    CLASSIFIER_MARKS,
    PALETTE,
    RING,
    Chart,
    Frame,
    Row,
    Span,
    described,
    key,
    panelled,
    values,
)
from .margins import split_histograms
from .results import RunResults, kept_by_rounds, kept_predicted, parameter_values, predicted, rounds_table
from .scatter import accuracy_axis, point, scatter_panel, window
from .tables import sensitivity_rows

SELECTED_BETA = "selected_beta"  # the signal that the page's slider sets
_PREDICTED, _CHOSEN, _FRONT = "predicted, every beta", "predicted, chosen beta", "best of all candidates"
_ROUNDS = "measured in rounds"
_MARKS = {
    **CLASSIFIER_MARKS,
    _PREDICTED: ("stroke", CLASSIFIER_COLOURS["mixed"]),
    _FRONT: ("stroke", CLASSIFIER_COLOURS["mixed"]),
    _CHOSEN: (RING, CLASSIFIER_COLOURS["mixed"]),
    _ROUNDS: ("diamond", PALETTE[3]),
}


def figures(results: RunResults) -> dict[str, Chart]:
    """Every registered chart that the run has something for, by name."""
    made: Mapping[str, Chart | None] = {name: CHARTS.get(name)(results) for name in CHARTS.names()}
    return {name: chart for name, chart in made.items() if chart is not None}


def caption(name: str) -> str:
    """What stands under a figure."""
    entry = CHARTS.entries()[name]
    return str(entry.facts.get("caption", entry.describes))


@CHARTS(
    "tradeoff",
    describes="Clean against robust accuracy: predicted for every beta, and measured",
    caption="Dots: what the search predicts for every beta, clean accuracy against the robust images that stay right "
    "under the stored perturbations. Line: the best that any candidate with any alpha is predicted to reach, where the "
    "search has stored it. Ring: the beta of the slider. Marks with whiskers: measured under attack, "
    "with 95 % intervals.",
    order=1,
)
def tradeoff(results: RunResults) -> Chart | None:
    """Two panels, everything from 0 up and the part around the curve that decides; a paper's column has the second."""
    if results.found is None:
        return None
    curve, marks = _curve(results), _measured_marks(results)
    front = [{"clean": clean.percent, "robust": kept.percent} for clean, kept in map(predicted, results.search.front)]
    line = _FRONT if front else _PREDICTED
    shown = [name for name in _MARKS if name in {line, _CHOSEN, *(mark["series"] for mark in marks)}]
    close = _close_window(curve, marks)
    left = min([*(mark["clean_low"] for mark in marks), *(step["clean"] for step in curve)])
    whole = (max(0.0, left - 4), 100.0), (0.0, 100.0)

    def draw(frame: Frame) -> Any:
        drawn = [name for name in shown if name != "std"] if frame.single else shown  # std lies far from the curve
        marked = key(drawn, frame, _MARKS, called=results.names)
        columns, gap = (1 if frame.narrow else 2), 5.5 * frame.font
        named_few = [{**mark, "name": mark["name"] * (mark["series"] in ("std", "rob", "mixed"))} for mark in marks]
        windows = ((whole, "All of it (frame: the other panel)"), (close, "Around the curve"))
        side = frame.panel(columns, gap=gap)
        panels = [
            scatter_panel(
                marks if span is close else named_few,
                {line: front or curve}, marked, span, (side, side), frame,
                title="" if frame.single else title, stepped=bool(front),
                layers=[*_ring_layers(curve, span, marked, frame), *([] if span is close else [_frame(close)])],
            )
            for span, title in (windows[1:] if frame.single else windows)
        ]  # fmt: skip
        chosen = {"name": SELECTED_BETA, "value": results.parameters.beta}
        resolve = {"color": "shared", "shape": "shared"}
        return panelled(panels, resolve=resolve, columns=columns, spacing=gap, bounds="flush", params=[chosen])

    return described(draw, _tradeoff_words(results))


def _curve(results: RunResults) -> list[Row]:
    return [{**parameter_values(entry), **point(_CHOSEN, "", *predicted(entry))} for entry in results.search.entries]


def _measured_marks(results: RunResults) -> list[Row]:
    """std, rob and mixed by the names that the run gives them; what the rounds measured."""
    own = [
        point(row.classifier, results.called(row.classifier), row.clean, row.robust, attack=row.attack)
        for row in results.accuracy
    ]
    by_beta = {entry.beta: entry for entry in results.search.entries}
    rounds = [
        point(_ROUNDS, f"β {beta:g}", predicted(by_beta[beta])[0], Count(kept.correct, results.n_images), beta=beta)
        for beta, kept in kept_by_rounds(results.search).items()
        if beta != results.parameters.beta
    ]
    return [*own, *rounds]


def _close_window(curve: list[Row], marks: list[Row]) -> tuple[Span, Span]:
    """Holds rob and mixed with their intervals and the curve as far down as 10 points below them."""
    near = [mark for mark in marks if mark["series"] != "std"]
    floor = min(mark["robust_low"] for mark in near) - 10
    steps = [{"clean": step["clean"], "robust": step["robust"]} for step in curve if step["robust"] >= floor]
    return window([*near, *steps])


def _ring_layers(
    curve: list[Row], shown: tuple[Span, Span], colour_and_shape: tuple[Any, Any], frame: Frame
) -> list[Any]:
    """Every beta as a dot, and around the slider's a ring."""
    colour, shape = colour_and_shape
    x, y = accuracy_axis("clean", shown[0]), accuracy_axis("robust", shown[1])
    numbers = ("beta", "s", "p", "c", "alpha", "clean", "robust")
    tooltip = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in numbers]
    base = alt.Chart(values(curve))
    chosen = base.transform_filter(f"datum.beta === {SELECTED_BETA}")
    return [
        base.mark_circle(clip=True, size=0.18 * frame.font**2, opacity=1, color=CLASSIFIER_COLOURS["mixed"]).encode(
            x=x, y=y, tooltip=tooltip
        ),
        chosen.mark_point(clip=True, filled=True, size=0.6 * frame.font**2, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=tooltip
        ),
    ]  # fmt: skip


def _frame(close: tuple[Span, Span]) -> Any:
    (left, right), (bottom, top) = close
    corners = {"clean": left, "clean_to": right, "robust": bottom, "robust_to": top}
    frame = alt.Chart(values([corners])).mark_rect(fillOpacity=0, stroke="#8b929b", strokeDash=[3, 3], strokeWidth=1)
    return frame.encode(x=alt.X("clean:Q"), x2=alt.X2("clean_to:Q"), y=alt.Y("robust:Q"), y2=alt.Y2("robust_to:Q"))


def _tradeoff_words(results: RunResults) -> str:
    def pair(clean: Count, robust: Count) -> str:
        return f"{percent_text(clean)} % clean and {percent_text(robust)} % robust"

    first, last = results.search.entries[0], results.search.entries[-1]
    measured = ", ".join(f"{row.classifier} {pair(row.clean, row.robust)}" for row in results.accuracy)
    return (
        f"Clean against robust accuracy. Measured: {measured}. The predicted curve runs from {pair(*predicted(first))} "
        f"at beta {first.beta:g} to {pair(*predicted(last))} at beta {last.beta:g}."
    )


@CHARTS(
    "rounds",
    describes="What each round of the search predicted and measured",
    caption="Each round attacks the choice, and the search chooses again with the perturbations that were found: the "
    "share of rob’s robust images that the choice keeps, and its clean accuracy. Last: the whole adaptive attack on "
    "what was deployed.",
    order=2,
)
def rounds(results: RunResults) -> Chart | None:
    """Rounds against kept, predicted and measured, and against clean accuracy, at the deployed beta."""
    if results.found is None or results.kept is None or len(results.search.rounds) < 2:
        return None  # of one round the sentence and the table say all
    chosen = results.parameters
    steps: list[tuple[str, Count, Count, Count]] = [
        (f"round {row[0]}", row[2], row[3], row[4])  # type: ignore[misc]
        for row in rounds_table(results).rows
        if row[1] == chosen.beta
    ]
    last = ("attack", results.row("mixed").clean, kept_predicted(results, chosen), results.kept)
    return described(rounds_chart([*steps, last], chosen.beta), _rounds_words([*steps, last]))


def rounds_chart(steps: list[tuple[str, Count, Count, Count]], beta: float) -> Chart:
    """Steps by name, with what is clean right, predicted to be kept, and measured."""
    kept = [
        {"x": _on_axis(name), "y": count.percent, "series": series}
        for name, _, foreseen, measured in steps
        for series, count in (("predicted", foreseen), ("measured", measured))
    ]
    clean = [{"x": _on_axis(name), "y": count.percent, "series": "clean"} for name, count, *_ in steps]
    level = (100 * beta, f"β = {beta:g}")
    return beside(
        lines(kept, x="round", y="robust images kept (%)", named=True, rule=level),
        lines(clean, x="round", y="clean accuracy (%)", named=True),
    )


def _on_axis(step: str) -> str:
    """`2` for `round 2`: the axis' title says that these are rounds."""
    return step.removeprefix("round ")


def _rounds_words(steps: list[tuple[str, Count, Count, Count]]) -> str:
    said = [
        f"{name}: {clean.correct} of {clean.total} clean, {foreseen.correct} predicted and {measured.correct} measured "
        f"of {measured.total} kept"
        for name, clean, foreseen, measured in steps
    ]
    return f"Rounds of the search. {'; '.join(said)}."


@CHARTS(
    "margins",
    describes="What a cutoff on rob's margins separates, before and behind M",
    caption="Share of each group’s images by confidence margin (top probability minus runner-up), on an axis "
    "stretched at 0 and at 1. Bars: attacked images that rob gets right. Dashed outline: clean images that it gets "
    "wrong. Line: the cutoff, behind M the deployed one, else the one that keeps as many of the bars’ images on its "
    "right. Left of it std decides.",
    order=3,
)
def margins(results: RunResults) -> Chart | None:
    """Histograms of the two groups that the cutoff is to separate, one for each form of rob."""
    if not results.splits:
        return None
    said = [
        f"{split.form}: of {split.kept.total} attacked and right images {split.kept.correct} above the cutoff, of "
        f"{split.left_to_std.total} clean and wrong ones {split.left_to_std.correct} below it"
        for split in results.splits
    ]
    return described(split_histograms(results.splits), f"Histograms of margins. {'; '.join(said)}.")


@CHARTS(
    "sensitivity",
    describes="The objective over s and c, for each p",
    caption="The search’s objective over scale s and bias c, one map for each power p, at the deployed beta. Darker is "
    "better; the ring is what was selected; × cannot be used. A wide dark region means that the exact values hardly "
    "matter, a dark cell at the border that the grid should be wider.",
    order=4,
)
def sensitivity(results: RunResults) -> Chart | None:
    """One map for each power, all in one colour scale."""
    rows, chosen = sensitivity_rows(results) if results.candidates else [], None
    if not rows:
        return None
    chosen, criterion = results.parameters, CRITERIA.get(results.search.criterion)
    meaning = f"{criterion.meaning} (%)"
    found = [float(str(row["objective"])) for row in rows if row["objective"] is not None]
    span = f"between {min(found):.1f} and {max(found):.1f} %" if found else "nowhere defined"
    unusable = f"; {len(rows) - len(found)} cannot be used" if len(rows) > len(found) else ""
    words = (
        f"Colour maps of the objective, {meaning}, over scale s and bias c, one for each power p, at beta "
        f"{chosen.beta:g}. Over {len(rows)} candidates it lies {span}{unusable}. Selected: s {chosen.scale:.4g}, "
        f"p {chosen.power:.4g}, c {chosen.bias:.4g}."
    )
    return described(maps(rows, meaning=meaning, maximised=criterion.maximised), words)


@CHARTS(
    "survival",
    describes="What each step of the attack leaves standing",
    caption="Images still right after each step; in brackets, how many the step took. Each step attacks only what is "
    "still standing.",
    order=5,
)
def survival(results: RunResults) -> Chart:
    """One bar a step: the share of images that are still right after it."""
    rows = [
        {
            "name": step.step,
            "value": step.standing.percent,
            "label": f"{step.standing.correct}" + (f"  (−{step.lost})" if step.lost and number else ""),
        }
        for number, step in enumerate(results.survival)
    ]
    steps = ", ".join(f"{step.step} {step.standing.correct}" for step in results.survival)
    words = f"Images of {results.n_images} that are right after each step: {steps}."
    return described(bars(rows, value="right after this step (%)", within=(0.0, 100.0)), words)

"""Histograms of the confidence margins: how sure each classifier is where it is right, and where it is wrong."""

from typing import Any

import altair as alt
import numpy as np

from .chart_style import PREDICTION_COLOURS, Layout, text_layer, values
from .confidence import CLASSIFIERS, Images, MarginGroup
from .results import RunResults

IMAGES: tuple[Images, ...] = ("clean", "attacked")
N_BINS = 25
_DASHES = {"correct": [1, 0], "incorrect": [4, 2]}


def margin_chart(results: RunResults, layout: Layout) -> alt.TopLevelMixin:
    """One panel a classifier, clean and attacked; bars where it is right, a dashed outline where it is wrong.

    Panels are joined one by one: a Vega facet with a missing cell (std, attacked) moves the others into its place.
    """
    clean_first = [(classifier, images) for images in IMAGES for classifier in CLASSIFIERS]
    by_classifier = [(classifier, images) for classifier in CLASSIFIERS for images in IMAGES]
    cells, columns = (clean_first, 4) if layout == "wide" else (by_classifier, 2)
    panels = [_panel(results, *cell, layout, first=not i % columns) for i, cell in enumerate(cells)]
    gaps = {"wide": {"row": 72, "column": 34}, "narrow": {"row": 66, "column": 34}}[layout]
    return alt.concat(*panels, columns=columns, spacing=gaps, bounds="flush").properties(
        description=margin_description(results)
    )


def margin_description(results: RunResults) -> str:
    """The chart in words: the medians."""
    medians = [
        f"{group.classifier} on {group.images} images, {_prediction(group)}: {group.median:.3f}"
        for group in results.margins
        if group.median is not None
    ]
    return f"Histograms of confidence margins between 0 and 1. Medians: {'; '.join(medians)}."


def _prediction(group: MarginGroup) -> str:
    return "correct" if group.correct else "incorrect"


def _panel(
    results: RunResults, classifier: str, images: Images, layout: Layout, *, first: bool
) -> alt.LayerChart | alt.FacetChart:
    groups = [group for group in results.margins if (group.classifier, group.images) == (classifier, images)]
    rows = [row for group in groups for row in (*_bin_rows(group), *_median_rows(group))]
    top = 1.1 * max((row["share"] for row in rows if "share" in row), default=100.0)
    layers = _layers(values(rows), top, "share (%)" if first else None) if rows else [_nothing_stored()]
    width, height = {"wide": (156, 110), "narrow": (118, 84)}[layout]
    return alt.layer(*layers).properties(width=width, height=height, title=f"{classifier}, {images}")


def _nothing_stored() -> alt.Chart:
    return text_layer(values([{"words": "not stored"}]), fontStyle="italic").encode(text="words:N")


def _bin_rows(group: MarginGroup) -> list[dict[str, Any]]:
    """Share of the group in each bin; the last bin's share once more at 1, where the outline ends."""
    if not group.margins:
        return []
    counts, edges = np.histogram(group.margins, bins=N_BINS, range=(0.0, 1.0))
    shares = 100 * counts / len(group.margins)
    bins = [*zip(edges[:-1], edges[1:], shares, strict=True), (1.0, 1.0, shares[-1])]
    return [
        {
            **_identity(group),
            "kind": "bin",
            "left": round(float(left), 4),
            "right": round(float(right), 4),
            "share": round(float(share), 3),
        }
        for left, right, share in bins
    ]


def _median_rows(group: MarginGroup) -> list[dict[str, Any]]:
    if group.median is None:
        return []
    return [{**_identity(group), "kind": "median", "left": group.median}]


def _identity(group: MarginGroup) -> dict[str, Any]:
    return {
        "classifier": group.classifier,
        "images": group.images,
        "prediction": _prediction(group),
        "n": len(group.margins),
    }


def _bins_of(prediction: str) -> str:
    return f"datum.kind === 'bin' && datum.prediction === '{prediction}'"


def _layers(data: alt.InlineData, top: float, title: str | None) -> list[alt.Chart]:
    domain = list(PREDICTION_COLOURS)
    colour = alt.Color(
        "prediction:N",
        scale=alt.Scale(domain=domain, range=list(PREDICTION_COLOURS.values())),
        legend=alt.Legend(title=None, orient="top", symbolType="stroke", symbolStrokeWidth=3),
    )
    dash = alt.StrokeDash("prediction:N", scale=alt.Scale(domain=domain, range=list(_DASHES.values())), legend=None)
    x = alt.X(
        "left:Q",
        title="margin",
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(values=[0, 0.5, 1], format=".1~f"),
    )
    y = alt.Y("share:Q", title=title, scale=alt.Scale(domain=[0, top], nice=False), axis=alt.Axis(tickCount=3))
    tooltip = [
        alt.Tooltip("prediction:N", title="prediction"),
        alt.Tooltip("n:Q", title="images in the group"),
        alt.Tooltip("left:Q", title="margin", format=".4f"),
    ]
    bars = alt.Chart(data).mark_bar(opacity=0.6).transform_filter(_bins_of("correct"))
    outline = alt.Chart(data).mark_line(interpolate="step-after", strokeWidth=1.5)
    medians = alt.Chart(data).mark_rule(strokeWidth=1.5).transform_filter("datum.kind === 'median'")
    return [
        bars.encode(x=x, x2="right:Q", y=y, y2=alt.datum(0), color=colour),
        outline.encode(x=x, y=y, color=colour, strokeDash=dash).transform_filter(_bins_of("incorrect")),
        medians.encode(x=x, color=colour, strokeDash=dash, tooltip=tooltip),
    ]

"""The kinds of chart that reports and studies draw: scatter, lines, bars, histograms, maps; and their files.

A chart is a function of the frame that it is drawn for, so that the same data fill a desktop column, a phone, and a
column or a page of a paper with text of the right size. On paper one pixel is one point (1/72 inch).
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode

from .counts import Count

Row = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """What a figure is drawn for."""

    name: str
    width: int  # of the whole figure, in pixels
    font: int  # of every text in it, in pixels
    narrow: bool = False  # half as many panels beside each other
    single: bool = False  # one panel where a chart has several views of the same points
    stretch: float = 0.0  # what the panels together are wider than planned, so that the figure has its width

    def panel(self, columns: int, *, gap: float = 0, beside: float = 60) -> int:
        """The width of one of `columns` panels with a gap between two of them and `beside` for axes and the like."""
        return max(20, int((self.width - beside - gap * (columns - 1) + self.stretch) / columns))


Drawn = Any  # one of Altair's charts, or a Vega-Lite specification
Chart = Callable[[Frame], Drawn]
at_x: Any = alt.XValue  # a place in pixels; these two have no types in Altair
at_y: Any = alt.YValue

WIDE = Frame("wide", 760, 12)
NARROW = Frame("narrow", 340, 12, narrow=True)
# A column and the text width of a paper; vl_convert takes 72 pixels for an inch, so that 8 pixels are 8 points.
PAPER = (Frame("3.25in", 234, 8, narrow=True, single=True), Frame("5.5in", 396, 8))
PAPER_PPI = 300
_SLACK = 6  # pixels that a figure may be narrower than its frame

# Each has a contrast of at least 3:1 against both page backgrounds; a second cue (shape, dash, label) goes with each.
CLASSIFIER_COLOURS = {"std": "#7b8087", "rob": "#2f7fc1", "mixed": "#cb5a1d"}
PALETTE = ("#2f7fc1", "#cb5a1d", "#0f8f84", "#8a5fb0", "#b5761a", "#7b8087", "#b0457a", "#4c6a2e")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
CLASSIFIER_MARKS = {
    name: (shape, CLASSIFIER_COLOURS[name])
    for name, shape in {"std": "square", "rob": "triangle-up", "mixed": "circle"}.items()
}
_EVERY = (SHAPES, PALETTE)
DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3])
RIGHT_AND_WRONG = {"right": "#0f8f84", "wrong": "#b5761a"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def vega_config(*, dark: bool = False, font: int = 12) -> Row:
    """Vega-Lite configuration for a light or a dark page, or for paper."""
    ink, muted, line, background = (
        ("#e6e8eb", "#a3abb5", "#3a4049", "#15181c") if dark else ("#1f2328", "#57606a", "#d5d9de", "#ffffff")
    )
    sizes = {"labelFontSize": font, "titleFontSize": font, "titleFontWeight": "normal"}
    return {
        "background": background,
        "font": FONT,
        "padding": 2,
        "view": {"stroke": line},
        "axis": {
            **sizes, "labelColor": muted, "titleColor": ink, "gridColor": line, "gridOpacity": 0.6,
            "domainColor": line, "tickColor": line, "tickSize": font / 3,
        },
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": font},
        "legend": {
            **sizes, "labelColor": ink, "titleColor": ink, "symbolSize": 5 * font, "labelLimit": 30 * font,
            "symbolStrokeWidth": 1.5, "symbolOpacity": 1, "columnPadding": font, "rowPadding": 2, "offset": font,
        },
        "title": {"color": ink, "fontSize": font, "fontWeight": "normal", "anchor": "start", "frame": "group"},
        "text": {"color": ink, "fontSize": font},
        "rule": {"color": muted},
    }  # fmt: skip


def values(rows: Iterable[Row]) -> alt.NamedData:
    """Rows for the layers of the chart that is being drawn; they travel in its specification.

    By name, because Altair copies rows that stand in a layer at every step, which takes longer than drawing.
    """
    name = f"rows-{len(_rows_being_drawn)}"
    _rows_being_drawn[name] = list(rows)
    return alt.NamedData(name=name)


_rows_being_drawn: dict[str, list[Row]] = {}  # of the call of `drawn` that is under way


def layered(*layers: Drawn, width: int, height: int) -> Row:
    """Layers over each other.

    `alt.layer` and `alt.concat` copy all that they are given, again at every level: most of the time of drawing.
    """
    return {"width": width, "height": height, "layer": [_specification(layer) for layer in layers]}


def panelled(panels: Iterable[Drawn], *, resolve: Mapping[str, str], **options: Any) -> Row:
    """Panels in rows; `resolve` says which channels are "shared" and which "independent"."""
    return {"concat": [_specification(panel) for panel in panels], "resolve": {"scale": dict(resolve)}, **options}


def _specification(chart: Drawn) -> Row:
    """Without what stands at the top of a whole figure: its configuration, its rows and the only address in it."""
    if isinstance(chart, dict):
        return chart
    with debug_mode(False):  # nothing is held against the schema: that takes longer than drawing
        spec: Row = chart.to_dict(validate=False)
    _rows_being_drawn.update(spec.pop("datasets", {}))
    return {name: value for name, value in spec.items() if name not in ("$schema", "config")}


def described(chart: Chart, words: str) -> Chart:
    """The chart with its content in words, for people who cannot see it."""
    return lambda frame: {**_specification(chart(frame)), "description": words}


def key(names: Sequence[str], frame: Frame, marks: Mapping[str, tuple[str, str]] | None = None) -> tuple[Any, Any]:
    """Colour and shape of each name, with one key for both above the chart where there are several names.

    Args:
        marks: name -> (shape, colour); those of std, rob and mixed by default, other names take the free ones in turn.
    """
    own = {name: mark for name, mark in (marks or CLASSIFIER_MARKS).items() if name in names}
    shapes, colours = ([each for each in every if all(each not in mark for mark in own.values())] for every in _EVERY)
    others = [name for name in names if name not in own]
    drawn_as = own | {
        name: (shape, colour) for name, shape, colour in zip(others, shapes * 4, colours * 4, strict=False)
    }
    widest = frame.font * (0.55 * max(map(len, names), default=0) + 3)  # of an entry: its letters, its symbol
    columns = max(1, min(2 if frame.narrow else 3, int(frame.width / widest)))
    legend = alt.Legend(title=None, orient="top", columns=columns, labelLimit=0) if len(names) > 1 else None

    def channel(kind: Any, which: int) -> Any:
        scale = alt.Scale(domain=names, range=[drawn_as[name][which] for name in names])
        return kind("series:N", scale=scale, legend=legend)

    return channel(alt.Color, 1), channel(alt.Shape, 0)


def heading(words: str, frame: Frame) -> Drawn:
    """What a panel is called, at one height for all panels; a title stands where the panel's labels let it."""
    mark = alt.Chart(values([{"words": words}])).mark_text(align="left", baseline="bottom", dy=-0.4 * frame.font)
    return mark.encode(x=at_x(0), y=at_y(0), text=alt.Text("words:N"))


# A circle with a hole; the inner arc runs the other way round, so that it is not filled.
RING = "M1.3,0A1.3,1.3,0,1,0,-1.3,0A1.3,1.3,0,1,0,1.3,0ZM0.9,0A0.9,0.9,0,1,1,-0.9,0A0.9,0.9,0,1,1,0.9,0Z"


# --- scatter: clean against robust accuracy --------------------------------------------------------------------------


def point(series: str, name: str, clean: Count, robust: Count, **more: Any) -> Row:
    """A mark of a scatter, with its 95 % intervals as whiskers and `more` for its tooltip."""
    (clean_low, clean_high), (robust_low, robust_high) = clean.interval, robust.interval
    return {
        "series": series, "name": name, "clean": clean.percent, "clean_low": clean_low, "clean_high": clean_high,
        "robust": robust.percent, "robust_low": robust_low, "robust_high": robust_high, **more,
    }  # fmt: skip


def accuracy_scatter(
    series: Mapping[str, Sequence[tuple[str, Count, Count]]], *, curves: Mapping[str, Sequence[Span]] | None = None
) -> Chart:
    """Clean against robust accuracy in percent: marks with whiskers, one colour and shape a series, curves behind.

    Args:
        series: (name, clean, robust) of each mark, by series.
        curves: (clean %, robust %) by a series' name, drawn as lines.
    """
    names = list(dict.fromkeys([*series, *(curves or {})]))
    marks = [point(name, *each) for name, group in series.items() for each in group]
    lines = {name: [{"clean": x, "robust": y} for x, y in curve] for name, curve in (curves or {}).items()}
    shown = window([*marks, *(step for curve in lines.values() for step in curve)])

    def draw(frame: Frame) -> Drawn:
        width = min(frame.panel(1), 480)
        return scatter_panel(marks, lines, key(names, frame), shown, (width, round(0.68 * width)), frame)

    return draw


def window(rows: Sequence[Row]) -> tuple[Span, Span]:
    """The part of [0, 100] x [0, 100] that holds these rows with their whiskers, and a little more."""

    def span(field: str) -> Span:
        found = [row[name] for row in rows for name in (field, f"{field}_low", f"{field}_high") if name in row]
        room = max(1.5, 0.08 * (max(found) - min(found)))
        return max(0.0, min(found) - room), min(100.0, max(found) + room)

    return span("clean"), span("robust")


def scatter_panel(
    marks: Sequence[Row],
    curves: Mapping[str, Sequence[Row]],
    colour_and_shape: tuple[Any, Any],
    shown: tuple[Span, Span],
    size: tuple[int, int],
    frame: Frame,
    *,
    layers: Sequence[Any] = (),
    stepped: bool = False,
    title: str = "",
) -> Drawn:
    """One panel; marks inside the window are drawn whole also where they lie on its edge.

    Args:
        stepped: curves are staircases: of what lies between two of their points, only the lower one can be had.
        layers: more of them, drawn behind the labels.
    """
    (left, right), (bottom, top) = shown
    colour, shape = colour_and_shape
    inside = [row for row in marks if left <= row["clean"] <= right and bottom <= row["robust"] <= top]
    x, y = accuracy_axis("clean", shown[0]), accuracy_axis("robust", shown[1])
    rule = alt.Chart(values(inside)).mark_rule(clip=True, opacity=0.7)
    steps = [{**row, "series": name, "order": i} for name, curve in curves.items() for i, row in enumerate(curve)]
    parts: list[Any] = [
        alt.Chart(values(steps)).mark_line(
            clip=True, strokeWidth=1.3, interpolate="step-before" if stepped else "linear"
        ).encode(x=x, y=y, color=colour, order=alt.Order("order:Q")),
        rule.encode(x=accuracy_axis("clean_low", shown[0]), x2=alt.X2("clean_high:Q"), y=y, color=colour),
        rule.encode(x=x, y=accuracy_axis("robust_low", shown[1]), y2=alt.Y2("robust_high:Q"), color=colour),
        *layers,
        alt.Chart(values(inside)).mark_point(filled=True, size=0.6 * frame.font**2, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=_tooltip(inside)
        ),
    ]  # fmt: skip
    obstacles = [row for row in steps if left <= row["clean"] <= right and bottom <= row["robust"] <= top]
    for place, labels in placed(inside, obstacles, shown, size, frame.font).items():
        text = alt.Chart(values(labels)).mark_text(align=place[0], dx=place[1], dy=place[2])
        parts.append(text.encode(x=x, y=y, text=alt.Text("name:N")))
    if title:
        parts.append(heading(title, frame))
    width, height = size
    return layered(*parts[0 if steps else 1 :], width=width, height=height)


def accuracy_axis(field: str, domain: Span) -> Any:
    """The horizontal axis for clean fields, the vertical one for all others, both in percent."""
    axis = alt.X if field.startswith("clean") else alt.Y
    title = "clean accuracy (%)" if field.startswith("clean") else "robust accuracy (%)"
    ticks = alt.Axis(tickCount=6, labelFlush=False)
    return axis(f"{field}:Q", title=title, scale=alt.Scale(domain=list(domain), nice=False), axis=ticks)


def _tooltip(rows: Sequence[Row]) -> list[alt.Tooltip]:
    named = [name for name in ("name", "run", "attack", "beta", "s", "p", "c", "alpha") if any(name in r for r in rows)]
    numbers = [alt.Tooltip(f"{name}:Q", title=f"{name} (%)", format=".2f") for name in ("clean", "robust")]
    return [*(alt.Tooltip(f"{name}:N", title=name) for name in named), *numbers]


# --- labels ----------------------------------------------------------------------------------------------------------

Place = tuple[Literal["left", "right", "center"], int, int]  # of a label beside its mark: alignment, dx, dy
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


def placed(
    marks: Sequence[Row], others: Sequence[Row], shown: tuple[Span, Span], size: tuple[int, int], font: int
) -> dict[Place, list[Row]]:
    """The marks' names by the place beside the mark that they get.

    One label after the other takes the place where it covers least of marks, curves and earlier labels, and reaches
    least beyond the panel. Marks that coincide share a label; marks without a name have none.
    """
    (left, right), (bottom, top) = shown
    width, height = size

    def pixels(row: Row) -> tuple[float, float]:
        x = (row["clean"] - left) / max(right - left, 1e-9) * width
        return x, (top - row["robust"]) / max(top - bottom, 1e-9) * height

    radius = 0.45 * font
    taken: list[Box] = []
    for row in (*marks, *others):
        x, y = pixels(row)
        taken.append((x - radius, y - radius, x + radius, y + radius))
    names: dict[Span, list[str]] = {}
    for row in marks:
        if row["name"]:
            names.setdefault((row["clean"], row["robust"]), []).append(row["name"])
    near, far = round(0.65 * font), round(0.9 * font)
    places: tuple[Place, ...] = (
        ("left", near, -near), ("left", near, near), ("right", -near, -near), ("right", -near, near),
        ("left", far, 0), ("right", -far, 0), ("center", 0, -far - 2), ("center", 0, far + 3),
    )  # fmt: skip
    found: dict[Place, list[Row]] = {}
    for (clean, robust), same in names.items():
        label: Row = {"clean": clean, "robust": robust, "name": ", ".join(dict.fromkeys(same))}
        boxes = {place: _box(pixels(label), label["name"], place, font) for place in places}
        costs = {
            place: sum(_overlap(box, other) for other in taken) + 3 * _outside(box, size)
            for place, box in boxes.items()
        }
        best = min(places, key=lambda place: costs[place])
        taken.append(boxes[best])
        found.setdefault(best, []).append(label)
    return found


def _box(mark: tuple[float, float], text: str, place: Place, font: int) -> Box:
    """What a label covers, about: letters of system fonts are 0.55 as wide as they are high."""
    (x, y), (align, dx, dy) = mark, place
    width = 0.55 * font * len(text)
    left = x + dx - {"left": 0.0, "right": width, "center": width / 2}[align]
    return left, y + dy - 0.6 * font, left + width, y + dy + 0.6 * font


def _overlap(one: Box, other: Box) -> float:
    """The area that both cover."""
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _outside(box: Box, size: tuple[int, int]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, (0, 0, *size))


# --- lines, bars -----------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row], *, x: str, y: str, named: bool = False, rule: tuple[float, str] | None = None) -> Chart:
    """Lines with marks; rows hold `x`, `y`, `series` and, where known, `low` and `high` for a band.

    Args:
        x, y: the axes' titles.
        named: the values of x are names in their order, not numbers.
        rule: a level of y that is drawn across, and what it is.
    """
    names = list(dict.fromkeys(str(row["series"]) for row in rows))

    def draw(frame: Frame) -> Drawn:
        colour, shape = key(names, frame)
        scale = alt.Scale(zero=False, nice=False, padding=0.8 * frame.font)
        across: Any = alt.X("x:Q", title=x, scale=scale, axis=alt.Axis(tickCount=6))
        if named:
            across = alt.X(
                "x:N", title=x, sort=list(dict.fromkeys(row["x"] for row in rows)), axis=alt.Axis(labelAngle=0)
            )
        up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
        base, width = alt.Chart(values(rows)), min(frame.panel(1), 480)
        layers: list[Any] = [
            # Dashes are the marks' own: as a channel they would cut the outlines of the key's symbols, too.
            *(
                base.transform_filter(alt.datum.series == name)
                .mark_line(strokeWidth=1.5, strokeDash=dash)
                .encode(x=across, y=up, color=colour)
                for name, dash in zip(names, DASHES * 4, strict=False)
            ),
            base.mark_point(filled=True, size=0.5 * frame.font**2, opacity=1).encode(
                x=across, y=up, color=colour, shape=shape
            ),
        ]
        if all("low" in row for row in rows):
            band = base.mark_area(opacity=0.18).encode(
                x=across, y=alt.Y("low:Q", title=y), y2=alt.Y2("high:Q"), color=colour
            )
            layers.insert(0, band)
        if rule is not None:
            level = alt.Chart(values([{"y": rule[0], "words": rule[1]}]))
            layers.append(level.mark_rule(strokeDash=[2, 3], strokeWidth=1.2).encode(y=up))
            text = level.mark_text(align="left", dx=0.4 * frame.font)
            layers.append(text.encode(y=up, x=at_x(width), text=alt.Text("words:N")))
        return layered(*layers, width=width, height=round(0.62 * width))

    return draw


def beside(*charts: Chart) -> Chart:
    """Charts beside each other, on a narrow frame below each other."""

    def draw(frame: Frame) -> Drawn:
        columns, gap = (1 if frame.narrow else len(charts)), 2 * frame.font
        width = (frame.width - gap * (columns - 1)) // columns
        each = replace(frame, width=width, stretch=frame.stretch / columns)
        resolve = {"color": "independent", "shape": "independent"}
        return panelled([chart(each) for chart in charts], resolve=resolve, columns=columns, spacing=gap)

    return draw


def bars(rows: Sequence[Row], *, value: str, within: Span | None = None) -> Chart:
    """Horizontal bars; rows hold `name`, `value`, and where known `group`, `low` and `high`, and a `label`.

    Args:
        value: the axis' title.
        within: the axis' ends; from 0 to the largest number by default.
    """
    shown = [{"group": "", **row} for row in rows if row["value"] is not None]
    names, groups = (list(dict.fromkeys(str(row[field]) for row in shown)) for field in ("name", "group"))
    smallest, largest = (pick([row.get(end, row["value"]) for row in shown] or [0.0]) for pick, end in _EXTREMES)
    ends = within or (min(0.0, smallest), largest or 1.0)

    def draw(frame: Frame) -> Drawn:
        x = alt.X(
            "value:Q", title=value, scale=alt.Scale(domain=list(ends), nice=within is None), axis=alt.Axis(tickCount=5)
        )
        axis = alt.Axis(ticks=False, domain=False, labelLimit=0.42 * frame.width)
        y = alt.Y("name:N", sort=names, title=None, axis=axis)
        offset = alt.YOffset("group:N", sort=groups, scale=alt.Scale(domain=groups))
        few = 2 if frame.narrow else 3
        legend = alt.Legend(title=None, orient="top", columns=few, symbolType="square", labelLimit=0)
        scale = alt.Scale(domain=groups, range=list((PALETTE * 4)[: len(groups)]))
        one = {"color": alt.ColorValue(CLASSIFIER_COLOURS["mixed"])}
        several = {"color": alt.Color("group:N", scale=scale, legend=legend), "yOffset": offset}
        base, step = alt.Chart(values(shown)), 1.5 * frame.font
        width = min(frame.panel(1, beside=0.3 * frame.width), 560)
        tooltip = [alt.Tooltip("name:N"), alt.Tooltip("group:N"), alt.Tooltip("value:Q", title=value, format=".4~g")]
        layers: list[Any] = [base.mark_bar().encode(x=x, y=y, tooltip=tooltip, **(several if groups[1:] else one))]
        places = {"yOffset": offset} if groups[1:] else {}
        if shown and all("low" in row for row in shown):
            rule = base.mark_rule(strokeWidth=1.2)
            layers.append(rule.encode(y=y, x=alt.X("low:Q"), x2=alt.X2("high:Q"), **places))
        if shown and all("label" in row for row in shown):
            text = base.mark_text(align="left", dx=0.5 * frame.font, baseline="middle")
            layers.append(text.encode(x=at_x(width), y=y, text=alt.Text("label:N"), **places))
        height = round(len(names) * step * max(1, 0.75 * len(groups)) + 0.6 * step * len(names))
        return layered(*layers, width=width, height=height)

    return draw


_EXTREMES: tuple[tuple[Any, str], ...] = ((min, "low"), (max, "high"))


def count_bars(rows: Sequence[tuple[str, str, Count]], *, value: str = "images (%)") -> Chart:
    """`bars` of (name, group, count) in percent with 95 % intervals."""
    return bars(
        [
            {"name": name, "group": group, "value": each.percent, "low": each.interval[0], "high": each.interval[1]}
            for name, group, each in rows
        ],
        value=value,
    )


# --- histograms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One histogram: two groups of images over the same bins.

    `groups` are rows with `series` (one of the chart's two names), `counts` (images a bin), `n` and `median` (None
    draws no line); `edges` has one entry more than there are counts. `rule` is a place where a line is drawn.
    """

    title: str
    groups: Sequence[Row]
    edges: Sequence[float]
    rule: float | None = None


def histograms(
    panels: Sequence[Panel],
    *,
    x: str,
    columns: int,
    series: Mapping[str, str] = RIGHT_AND_WRONG,
    key_title: str = "prediction",
    odds: bool = False,
    empty: str = "no data",
) -> Chart:
    """Shares of groups over a stretched axis, a panel each; the first series as bars, the second as an outline.

    Args:
        columns: panels beside each other, on a wide frame.
        series: the two names, with their colours.
        odds: edges are log10(m / (1 - m)) of margins m, an axis that is stretched at 0 and at 1; else they are margins
            above 0, on a logarithmic axis.
    """

    def draw(frame: Frame) -> Drawn:
        beside, gap = (max(1, columns // 2) if frame.narrow else columns), round(3 * frame.font)
        order = list(panels)
        if frame.narrow and not len(order) % 2:  # what stands beside each other on a wide frame then stands below
            half = len(order) // 2
            order = [panel for pair in zip(order[:half], order[half:], strict=True) for panel in pair]
        width = frame.panel(beside, gap=gap)
        height = round((0.45 if beside == 1 else 0.7) * width)
        parts = [
            layered(
                *_histogram(panel, x, "" if i % beside else "share (%)", series, key_title, odds, empty),
                heading(panel.title, frame), width=width, height=height,
            )
            for i, panel in enumerate(order)
        ]  # fmt: skip
        spacing, resolve = {"row": 5.2 * frame.font, "column": gap}, {"color": "shared", "strokeDash": "shared"}
        return panelled(parts, resolve=resolve, columns=beside, spacing=spacing, bounds="flush")

    return draw


def _histogram(
    panel: Panel, x: str, y: str, series: Mapping[str, str], key_title: str, odds: bool, empty: str
) -> list[Drawn]:
    (bars_, outline), edges = series, panel.edges
    rows = [row for group in panel.groups for row in _bins(group, edges)]
    if not rows:
        return [alt.Chart(values([{"words": empty}])).mark_text(fontStyle="italic").encode(text=alt.Text("words:N"))]
    top = 1.1 * max(row["share"] for row in rows)
    legend = alt.Legend(title=key_title or None, orient="top", symbolType="stroke", titleOrient="left", labelLimit=0)
    colour = alt.Color(
        "series:N", scale=alt.Scale(domain=list(series), range=list(series.values())), legend=legend
    )  # fmt: skip
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=list(series), range=[[1, 0], [4, 2]]), legend=None)
    scale = alt.Scale(type="linear" if odds else "log", domain=[edges[0], edges[-1]], nice=False)
    labels: Row = {"labelExpr": _FROM_ODDS} if odds else {"format": "~g"}
    axis = alt.Axis(values=_whole_decades(edges, odds=odds), labelOverlap=True, **labels)
    across = alt.X("left:Q", title=x, scale=scale, axis=axis)
    scale_up = alt.Scale(domain=[0, top], nice=False)
    up = alt.Y("share:Q", title=y or None, scale=scale_up, axis=alt.Axis(tickCount=3))
    medians = [
        {"series": group["series"], "left": max(group["median"], edges[0]), "n": group["n"]}
        for group in panel.groups
        if group["median"] is not None
    ]
    base = alt.Chart(values(rows))
    tooltip = [alt.Tooltip("series:N"), alt.Tooltip("n:Q", title="images"), alt.Tooltip("left:Q", title="median")]
    layers = [
        base.mark_bar(opacity=0.6).transform_filter(alt.datum.series == bars_).encode(
            x=across, x2=alt.X2("right:Q"), y=up, y2=alt.Y2Datum(0), color=colour
        ),
        base.mark_line(interpolate="step-after", strokeWidth=1.3).transform_filter(alt.datum.series == outline)
        .encode(x=across, y=up, color=colour, strokeDash=dash, order=alt.Order("left:Q")),
        alt.Chart(values(medians)).mark_rule(strokeWidth=1.5).encode(
            x=across, color=colour, strokeDash=dash, tooltip=tooltip
        ),
    ]  # fmt: skip
    if panel.rule is not None:
        cutoff = alt.Chart(values([{"left": min(max(panel.rule, edges[0]), edges[-1])}]))
        layers.append(cutoff.mark_rule(strokeWidth=1.5).encode(x=across))
    return layers


# 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-3, ... for log10(m / (1 - m)) = -2, -1, 0, 1, 2, 3, ...
_FROM_ODDS = (
    "datum.value < 0 ? format(pow(10, datum.value), '~g') : datum.value == 0 ? '0.5' : "
    "datum.value < 3 ? format(1 - pow(10, -datum.value), '~g') : '1−1e-' + datum.value"
)


_MOST_TICKS = 12  # each has a line of the grid: at 468 decades they fill the panel


def _whole_decades(edges: Sequence[float], *, odds: bool) -> list[float]:
    """Where the axis has ticks: at every decade, or where they are many at every second, fifth, tenth and so on."""
    ends = (edges[0], edges[-1]) if odds else (math.log10(edges[0]) - 1e-9, math.log10(edges[-1]))
    decades = range(math.ceil(ends[0]), math.floor(ends[1]) + 1)
    steps = (step * 10**k for k in itertools.count() for step in (1, 2, 5))
    apart = next(step for step in steps if len(decades) / step <= _MOST_TICKS)
    return [float(n) if odds else 10.0**n for n in decades if n % apart == 0]


def _bins(group: Row, edges: Sequence[float]) -> list[Row]:
    """The share of the group in each bin; the last bin's once more at the end, where the outline ends."""
    if not group["n"]:
        return []
    shares = [100 * n / group["n"] for n in group["counts"]]
    steps = [*zip(edges, edges[1:], shares, strict=False), (edges[-1], edges[-1], shares[-1])]
    return [
        {"series": group["series"], "left": float(f"{left:.4g}"), "right": float(f"{right:.4g}"), "share": share}
        for left, right, share in steps
    ]


# --- maps ------------------------------------------------------------------------------------------------------------

_MOST_MAPS = 12


def maps(cells: Sequence[Row], *, meaning: str, maximised: bool) -> Chart:
    """The objective over s (across) and c (up), one map for each p, all in one colour scale; darker is better.

    Args:
        cells: rows of `s`, `p`, `c`, `objective` (None: cannot be used) and `selected`, which gets a ring.
        meaning: what the objective is, with its unit.
    """
    found = [row["objective"] for row in cells if row["objective"] is not None]
    powers = _shown_powers(cells)

    def draw(frame: Frame) -> Drawn:
        columns, gap = (2 if frame.narrow else 4), 1.2 * frame.font
        legend = alt.Legend(
            title=f"{meaning}; darker is better", orient="top", gradientLength=16 * frame.font,
            gradientThickness=0.8 * frame.font, titleLimit=0, format=".3~g",
        )  # fmt: skip
        ends = [min(found, default=0.0), max(found, default=1.0)]
        scale = alt.Scale(scheme="viridis", reverse=maximised, domain=ends, nice=False)
        colour = alt.Color("objective:Q", scale=scale, legend=legend)
        width = frame.panel(min(columns, len(powers)), gap=gap)
        panels = [
            _map([row for row in cells if row["p"] == power], colour, min(width, 220), frame, first=not i % columns)
            for i, power in enumerate(powers)
        ]
        spacing = {"row": 5 * frame.font, "column": gap}
        return panelled(panels, resolve={"color": "shared"}, columns=columns, spacing=spacing, bounds="flush")

    return draw


def _shown_powers(cells: Sequence[Row]) -> list[float]:
    """All of them, or an even choice of them with the selected one among them."""
    powers = sorted({row["p"] for row in cells})
    if len(powers) <= _MOST_MAPS:
        return powers
    picked = {powers[round(i * (len(powers) - 1) / (_MOST_MAPS - 1))] for i in range(_MOST_MAPS)}
    for chosen in {row["p"] for row in cells if row["selected"]}:
        picked = (picked - {min(picked, key=lambda power: abs(power - chosen))}) | {chosen}
    return sorted(picked)


def _map(rows: Sequence[Row], colour: alt.Color, width: int, frame: Frame, *, first: bool) -> Drawn:
    """One map; only the first of a row carries the labels of c, the grid is the same in all."""

    def axis(*, shown: bool) -> alt.Axis:
        return alt.Axis(
            format=".2~g", labels=shown, labelOverlap=True, labelAngle=0, grid=False, ticks=False, domain=False
        )

    x = alt.X("s:O", title="scale s", axis=axis(shown=True))
    y = alt.Y("c:O", title="bias c" if first else None, sort="descending", axis=axis(shown=first))
    columns, steps = (len({row[name] for row in rows}) for name in ("s", "c"))
    tooltip = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("s", "p", "c", "objective")]
    usable = [row for row in rows if row["objective"] is not None]
    unusable = [row for row in rows if row["objective"] is None]
    cells = alt.Chart(values(usable)).mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    crosses = alt.Chart(values(unusable)).mark_text(opacity=0.6).encode(x=x, y=y, text=alt.TextValue("×"))
    ring = alt.Chart(values(row for row in rows if row["selected"])).encode(x=x, y=y, tooltip=tooltip)
    rings = [
        ring.mark_point(size=0.6 * frame.font**2, stroke=ink, strokeWidth=wide)
        for ink, wide in (("#1f2328", 0.35 * frame.font), ("#ffffff", 0.17 * frame.font))
    ]
    sides = {"width": max(1, width // columns) * columns, "height": max(1, round(0.8 * width) // steps) * steps}
    named = heading(f"p = {rows[0]['p']:.4g}", frame)
    return layered(cells, crosses, *rings, named, **sides)  # whole pixels a cell: no seams


# --- files -----------------------------------------------------------------------------------------------------------


def drawn(chart: Chart, frame: Frame) -> tuple[Row, bytes]:
    """The chart as a Vega-Lite specification without any address in it, and as SVG; as wide as the frame.

    How much room axes and keys take is known only once the chart is drawn, so it is drawn, measured and drawn again,
    until it is no wider than the frame and only a few pixels narrower.
    """
    used = frame
    for _ in range(4):
        _rows_being_drawn.clear()
        with debug_mode(False):
            spec = _specification(chart(used))
        spec = {**spec, "datasets": dict(_rows_being_drawn)}
        picture = svg(spec, vega_config(font=frame.font))
        found = re.search(rb'<svg[^>]* width="([\d.]+)"', picture)
        left = frame.width - float(found[1]) if found else 0.0
        if 0 <= left <= _SLACK:
            break
        # Panels have whole pixels: of what is too wide a little more is taken away, lest rounding keeps it.
        used = replace(used, stretch=used.stretch + math.floor(left) - (_SLACK // 2 if left < 0 else 0))
    return spec, picture


def chart_files(name: str, chart: Chart, wide: tuple[Row, bytes] | None = None) -> dict[str, bytes]:
    """The figure as files: NAME.svg, NAME-dark.svg, and for papers PDF and PNG (300 dpi) in both widths, 8 pt text.

    Args:
        wide: the chart as drawn for `WIDE`, where that has been done.
    """
    spec, picture = wide or drawn(chart, WIDE)
    files = {f"{name}.svg": picture, f"{name}-dark.svg": svg(spec, vega_config(dark=True))}
    for frame in PAPER:
        paper = drawn(chart, frame)[1].decode()
        files[f"{name}-{frame.name}.pdf"] = vl_convert.svg_to_pdf(paper)
        files[f"{name}-{frame.name}.png"] = vl_convert.svg_to_png(paper, ppi=PAPER_PPI)
    return files


def svg(spec: Row, config: Row | None = None) -> bytes:
    """The figure as SVG, on white by default; drawn in this process, no browser and no network."""
    drawn: str = vl_convert.vegalite_to_svg(spec, config=config or vega_config(), allowed_base_urls=[])
    return drawn.encode()

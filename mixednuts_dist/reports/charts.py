"""The charts of reports and studies: lines, bars, histograms, maps, and clean against robust accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .counts import Count
from .drawing import CLASSIFIER_COLORS, PALETTE, PANEL, Figure, Row, Span, Spec, colors, key, layer, number, panel
from .table import Cell, Table, heading

DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3])
RIGHT_AND_WRONG = {"right": "#0f8f84", "wrong": "#b5761a"}
_MOST_MAPS = 12


def lines(rows: Sequence[Row], *, x: str, y: str) -> Figure:
    """Draw lines with marks; rows hold `x`, `y` and `series`.

    Args:
        x, y: the titles of the axes.
    """
    marked = key(list(dict.fromkeys(str(row["series"]) for row in rows)))
    place = {"x": number("x", x), "y": number("y", y, nice=True)}
    dash = {**marked["color"], "legend": None}
    dash["scale"] = {**dash["scale"], "range": DASHES}
    return Figure(
        [
            panel(
                layer("line", rows, {**place, "color": marked["color"], "strokeDash": dash}, strokeWidth=1.5),
                layer("point", rows, {**place, **marked}, filled=True, size=60, opacity=1),
            )
        ]
    )


def bars(rows: Sequence[Row], *, value: str, within: Span | None = None) -> Figure:
    """Draw horizontal bars; rows hold `name`, `value`, and if known `group`, `low` and `high`, and a `label`.

    Args:
        value: the title of the axis.
        within: the ends of the axis; by default from 0 to the largest number.
    """
    shown = [{**row, "series": row.get("group", "")} for row in rows if row["value"] is not None]
    names, groups = (list(dict.fromkeys(str(row[field]) for row in shown)) for field in ("name", "series"))
    scale = {"domain": list(within)} if within else {"zero": True, "nice": True}
    x = {**number("value", value, **scale), "axis": {"tickCount": 5}}
    y: Spec = {"field": "name", "type": "nominal", "sort": names, "title": None}
    y["axis"] = {"ticks": False, "domain": False, "labelLimit": 170}
    place: Spec = {"y": y}
    color: Spec = {"value": CLASSIFIER_COLORS["mixed"]}
    if groups[1:]:
        place["yOffset"] = {"field": "series", "sort": groups}
        color = colors(groups, {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(groups)}, symbolType="square")
    layers = [layer("bar", shown, {"x": x, "color": color, **place})]
    if shown and all("low" in row for row in shown):
        ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
        layers.append(layer("rule", shown, {**ends, **place}, strokeWidth=1.2))
    if shown and all("label" in row for row in shown):
        words = {"text": {"field": "label"}, "x": {"value": PANEL}}
        layers.append(layer("text", shown, {**words, **place}, align="left", dx=6))
    return Figure([panel(*layers, height=max(30, round(len(names) * (12 + 13 * len(groups)))))])


def table_bars(table: Table, *columns: str, value: str = "correct images (%)") -> Figure:
    """Draw a bar for each row and each of these columns; counts are in percent, with 95% intervals."""
    return bars(
        [
            {"name": str(row[table.columns[0]]), "group": heading(name), **_bar(row[name])}
            for row in table.dicts()
            for name in columns
        ],
        value=value,
    )


def _bar(cell: Cell) -> Row:
    return {"value": cell.percent, "low": cell.low, "high": cell.high} if isinstance(cell, Count) else {"value": cell}


# --- clean against robust accuracy -----------------------------------------------------------------------------------


def point(series: str, name: str, clean: Count | float, robust: Count | float) -> Row:
    """Return a mark of a scatter; a count has its 95% interval as whiskers, a plain percentage has none."""
    row: Row = {"series": series, "name": name}
    for axis, found in (("clean", clean), ("robust", robust)):
        percent, (low, high) = (found.percent, found.interval) if isinstance(found, Count) else (found, (found, found))
        row |= {axis: percent, f"{axis}_low": low, f"{axis}_high": high}
    return row


def accuracy_scatter(
    series: Mapping[str, Sequence[tuple[str, Count | float, Count | float]]],
    *,
    curves: Mapping[str, Sequence[Span]] | None = None,
) -> Figure:
    """Draw clean against robust accuracy in percent; the legend names each series.

    Args:
        series: (name, clean, robust) of each mark, by series; a name that differs from its series is drawn at the mark.
        curves: (clean %, robust %) by the name of a series, drawn as lines.
    """
    names = list(dict.fromkeys([*series, *(curves or {})]))
    marks = [point(name, *each) for name, group in series.items() for each in group]
    paths = {name: [{"clean": x, "robust": y} for x, y in curve] for name, curve in (curves or {}).items()}
    shown = window([*marks, *(step for curve in paths.values() for step in curve)])
    return Figure([scatter_panel(marks, paths, key(names), shown)])


def table_scatter(table: Table) -> Figure:
    """Draw the columns `clean` and `robust` of a table, one mark per row."""
    rows = [(str(row[table.columns[0]]), row["clean"], row["robust"]) for row in table.dicts()]
    return accuracy_scatter(
        {
            name: [(name, clean, robust)]
            for name, clean, robust in rows
            if isinstance(clean, Count) and isinstance(robust, Count)
        }
    )


def window(rows: Sequence[Row]) -> tuple[Span, Span]:
    """Return the part of [0, 100] x [0, 100] that holds these rows with their whiskers, and a little more."""

    def span(field: str) -> Span:
        found = [row[name] for row in rows for name in (field, f"{field}_low", f"{field}_high") if name in row]
        room = max(1.5, 0.08 * (max(found) - min(found)))
        return max(0.0, min(found) - room), min(100.0, max(found) + room)

    return span("clean"), span("robust")


def scatter_panel(
    marks: Sequence[Row],
    curves: Mapping[str, Sequence[Row]],
    marked: Mapping[str, Spec],
    shown: tuple[Span, Span],
    *,
    layers: Sequence[Spec] = (),
    title: str = "",
) -> Spec:
    """Draw one panel; marks inside the window are drawn whole even if they lie on its edge.

    Args:
        layers: further layers, drawn below the marks.
    """
    (left, right), (bottom, top) = shown
    inside = [row for row in marks if left <= row["clean"] <= right and bottom <= row["robust"] <= top]
    x, y = accuracy_axes(shown)
    color = {"color": marked["color"]}
    steps = [{**row, "series": name, "order": i} for name, curve in curves.items() for i, row in enumerate(curve)]
    line = {"x": x, "y": y, **color, "order": {"field": "order", "type": "quantitative"}}
    across = {"x": {**x, "field": "clean_low"}, "x2": {"field": "clean_high"}, "y": y, **color}
    along = {"x": x, "y": {**y, "field": "robust_low"}, "y2": {"field": "robust_high"}, **color}
    named = [row for row in inside if row["name"] not in ("", row["series"])]
    parts = [
        *([layer("line", steps, line, clip=True, strokeWidth=1.3)] if steps else []),
        layer("rule", inside, across, clip=True, opacity=0.7),
        layer("rule", inside, along, clip=True, opacity=0.7),
        *layers,
        layer("point", inside, {"x": x, "y": y, **marked}, filled=True, size=75, opacity=1),
        layer("text", named, {"x": x, "y": y, "text": {"field": "name"}}, align="left", dx=6, dy=-7),
    ]
    return panel(*parts, title=title, height=round(0.8 * PANEL))


def accuracy_axes(shown: tuple[Span, Span]) -> tuple[Spec, Spec]:
    """Return the channels of clean accuracy across and robust accuracy up."""
    x, y = (
        {**number(field, f"{field} accuracy (%)", domain=list(span)), "axis": {"tickCount": 5, "labelFlush": False}}
        for field, span in zip(("clean", "robust"), shown, strict=True)
    )
    return x, y


# --- histograms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Histogram:
    """Two groups of images over the same bins, by the names of the chart's two series."""

    title: str
    counts: Mapping[str, Sequence[int]]  # images in each bin
    edges: Sequence[float]  # one more than bins
    medians: Mapping[str, float | None]  # position of the line of each group
    rule: float | None = None  # position of another line


def histograms(
    shown: Sequence[Histogram],
    *,
    x: str,
    columns: int,
    series: Mapping[str, str] = RIGHT_AND_WRONG,
    odds: bool = False,
) -> Figure:
    """Draw shares of groups over a nonlinear axis, the first series as bars and the second as an outline.

    Args:
        series: the two names, with their colors.
        odds: True if edges are log10(m / (1 - m)) of margins m; otherwise they are margins above 0 on a log axis.
    """
    drawn = [_histogram(each, x, series, odds=odds, legend=i == 0) for i, each in enumerate(shown)]
    return Figure(drawn, columns=columns)


def _histogram(shown: Histogram, x: str, series: Mapping[str, str], *, odds: bool, legend: bool) -> Spec:
    (filled, outline), edges = series, shown.edges
    rows = [row for name, counts in shown.counts.items() for row in _bins(name, counts, edges)]
    across = number("left", x, type="symlog" if odds else "log", domain=[edges[0], edges[-1]])
    labels = {"labelExpr": _FROM_ODDS} if odds else {"format": "~g"}
    across["axis"] = {"values": _ticks(edges, odds=odds), "labelOverlap": True, "labelSeparation": 6, **labels}
    up = number("share", "share of images (%)", zero=True)
    color = colors(list(series), series, legend=legend, symbolType="stroke")
    medians = [{"series": name, "left": max(median, edges[0])} for name, median in shown.medians.items() if median]
    common = {"x": across, "color": color}
    layers = [
        layer("bar", [row for row in rows if row["series"] == filled],
              {**common, "x2": {"field": "right"}, "y": up, "y2": {"datum": 0}}, opacity=0.6),
        layer("line", [row for row in rows if row["series"] == outline], {**common, "y": up},
              interpolate="step-after", strokeWidth=1.3, strokeDash=[4, 2]),
        layer("rule", medians, common, strokeWidth=1.5),
    ]  # fmt: skip
    if shown.rule is not None:
        rule = [{"left": min(max(shown.rule, edges[0]), edges[-1])}]
        layers.append(layer("rule", rule, {"x": across}, strokeWidth=1.5))
    return panel(*layers, title=shown.title, height=round(0.5 * PANEL))


# 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-3, ... for log10(m / (1 - m)) = -2, -1, 0, 1, 2, 3, ...
_FROM_ODDS = (
    "datum.value < 0 ? format(pow(10, datum.value), '~g') : datum.value == 0 ? '0.5' : "
    "datum.value < 3 ? format(1 - pow(10, -datum.value), '~g') : '1−1e-' + datum.value"
)


def _ticks(edges: Sequence[float], *, odds: bool) -> list[float]:
    """Return the ticks of the axis: decades of the margin, or values of the log odds with growing distances."""
    if not odds:
        return [10.0**n for n in range(math.ceil(math.log10(edges[0]) - 1e-9), math.floor(math.log10(edges[-1])) + 1)]
    steps = (1, 2, 5) if edges[-1] < 20 else (1,)
    apart = [step * 10.0**k for k in range(7) for step in steps]
    return [n for n in (*(-n for n in reversed(apart)), 0.0, *apart) if edges[0] <= n <= edges[-1]]


def _bins(name: str, counts: Sequence[int], edges: Sequence[float]) -> list[Row]:
    """Return the share of a group in each bin, and the last share once more at the end of the outline."""
    if not any(counts):
        return []
    shares = [100 * n / sum(counts) for n in counts]
    steps = [*zip(edges, edges[1:], shares, strict=False), (edges[-1], edges[-1], shares[-1])]
    return [
        {"series": name, "left": float(f"{left:.4g}"), "right": float(f"{right:.4g}"), "share": share}
        for left, right, share in steps
    ]


# --- maps ------------------------------------------------------------------------------------------------------------


def maps(cells: Sequence[Row], *, meaning: str, maximized: bool) -> Figure:
    """Draw the objective over s (across) and c (up), one map per p, on one color scale; darker is better.

    Args:
        cells: rows of `s`, `p`, `c`, `objective` (None: cannot be used) and `selected`, which gets a ring.
        meaning: what the objective is, with its unit.
    """
    found = [row["objective"] for row in cells if row["objective"] is not None]
    ends = [min(found, default=0.0), max(found, default=1.0)]
    scale = {"scheme": "viridis", "reverse": maximized, "domain": ends, "nice": False}
    legend = {"title": [meaning, "(darker is better)"], "gradientLength": 170, "titleLimit": 0, "format": ".3~g"}
    color: Row = {"field": "objective", "type": "quantitative", "scale": scale}
    return Figure(
        [
            _map([row for row in cells if row["p"] == power], {**color, "legend": None if i else legend})
            for i, power in enumerate(_shown_powers(cells))
        ],
        columns=4,
    )


def _shown_powers(cells: Sequence[Row]) -> list[float]:
    """Return all powers, or an even choice of them with the selected one among them."""
    powers = sorted({row["p"] for row in cells})
    if len(powers) <= _MOST_MAPS:
        return powers
    picked = {powers[round(i * (len(powers) - 1) / (_MOST_MAPS - 1))] for i in range(_MOST_MAPS)}
    for chosen in {row["p"] for row in cells if row["selected"]}:
        picked = (picked - {min(picked, key=lambda power: abs(power - chosen))}) | {chosen}
    return sorted(picked)


def _map(rows: Sequence[Row], color: Row) -> Spec:
    axis: Row = {
        "format": ".2~r",
        "labelOverlap": True,
        "labelAngle": 0,
        "grid": False,
        "ticks": False,
        "domain": False,
    }
    x: Row = {"field": "s", "type": "ordinal", "title": "scale s", "axis": axis}
    y: Row = {"field": "c", "type": "ordinal", "title": "bias c", "sort": "descending", "axis": axis}
    usable = [row for row in rows if row["objective"] is not None]
    unusable = [row for row in rows if row["objective"] is None]
    selected, place = [row for row in rows if row["selected"]], {"x": x, "y": y}
    return panel(
        layer("rect", usable, {**place, "color": color}),
        layer("text", unusable, {**place, "text": {"value": "×"}}, opacity=0.6),
        layer("point", selected, place, size=70, stroke="#ffffff", strokeWidth=4),
        layer("point", selected, place, size=70, stroke="#cb5a1d", strokeWidth=2),
        title=f"p = {rows[0]['p']:.4g}", width=160, height=130,
    )  # fmt: skip

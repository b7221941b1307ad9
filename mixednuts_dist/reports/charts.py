"""The charts of reports and studies: lines, bars, histograms, maps, and clean against robust accuracy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .counts import Count
from .drawing import CLASSIFIER_COLORS, PALETTE, PANEL, Figure, Row, Span, Spec, colors, key, layer, number, panel
from .table import Cell, Table, heading

_Numbers = np.ndarray[Any, np.dtype[np.float64]]
DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3])
RIGHT_AND_WRONG = ("#0f8f84", "#b5761a")
_BINS = 40
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
        color = colors(groups, PALETTE, symbolType="square")
    layers = [layer("bar", shown, {"x": x, "color": color, **place})]
    if shown and all("low" in row for row in shown):
        ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
        layers.append(layer("rule", shown, {**ends, **place}, strokeWidth=1.2))
    if shown and all("label" in row for row in shown):
        words = {"text": {"field": "label"}, "x": {"value": PANEL}}
        layers.append(layer("text", shown, {**words, **place}, align="left", dx=6))
    return Figure([panel(*layers, height=max(30, round(len(names) * (12 + 13 * len(groups)))))])


def table_bars(table: Table, *columns: str, value: str) -> Figure:
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


def accuracy_scatter(
    series: Mapping[str, Sequence[tuple[str, Count | float, Count | float]]],
    *,
    curves: Mapping[str, Sequence[Span]] | None = None,
    marks: Mapping[str, tuple[str, str]] | None = None,
    called: Mapping[str, str] | None = None,
    enlarged: Sequence[str] = (),
) -> Figure:
    """Draw clean against robust accuracy in percent, counts with 95% intervals; the legend names each series.

    Args:
        series: (name, clean, robust) of each mark, by series; a name that differs from its series is drawn at the mark.
        curves: (clean %, robust %) by the name of a series, drawn as lines with dots.
        marks, called: as in `key`.
        enlarged: series that a second panel shows larger; a dashed frame in the first panel marks this part.
    """
    rows = [_mark(name, *each) for name, group in series.items() for each in group]
    steps = [
        {"series": name, "order": i, "clean": clean, "robust": robust}
        for name, curve in (curves or {}).items()
        for i, (clean, robust) in enumerate(curve)
    ]
    names = list(dict.fromkeys([*series, *(curves or {})]))
    close = [_window([row for row in rows if row["series"] in enlarged])] if enlarged else []
    return Figure(
        [
            _scatter_panel(rows, steps, key(names, marks, legend=i == 0, called=called), window, () if i else close)
            for i, window in enumerate([_window([*rows, *steps]), *close])
        ]
    )


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


def _mark(series: str, name: str, clean: Count | float, robust: Count | float) -> Row:
    """Return a row of a scatter; a count has its 95% interval as whiskers, a plain percentage has none."""
    row: Row = {"series": series, "name": name}
    for axis, found in (("clean", clean), ("robust", robust)):
        percent, (low, high) = (found.percent, found.interval) if isinstance(found, Count) else (found, (found, found))
        row |= {axis: percent, f"{axis}_low": low, f"{axis}_high": high}
    return row


def _window(rows: Sequence[Row]) -> tuple[Span, Span]:
    """Return the part of [0, 100] x [0, 100] that holds these rows with their whiskers, and a little more."""

    def span(field: str) -> Span:
        found = [row[name] for row in rows for name in (field, f"{field}_low", f"{field}_high") if name in row]
        room = max(1.5, 0.08 * (max(found) - min(found)))
        return max(0.0, min(found) - room), min(100.0, max(found) + room)

    return span("clean"), span("robust")


def _scatter_panel(
    rows: Sequence[Row],
    steps: Sequence[Row],
    marked: Mapping[str, Spec],
    window: tuple[Span, Span],
    frames: Sequence[tuple[Span, Span]],
) -> Spec:
    """Draw one panel; marks inside the window are drawn whole even if they lie on its edge."""
    (left, right), (bottom, top) = window
    inside = [row for row in rows if left <= row["clean"] <= right and bottom <= row["robust"] <= top]
    x, y = (
        {**number(field, f"{field} accuracy (%)", domain=list(span)), "axis": {"tickCount": 5, "labelFlush": False}}
        for field, span in zip(("clean", "robust"), window, strict=True)
    )
    place: Spec = {"x": x, "y": y, "color": marked["color"]}
    line = {**place, "order": {"field": "order", "type": "quantitative"}}
    across = {**place, "x": {**x, "field": "clean_low"}, "x2": {"field": "clean_high"}}
    along = {**place, "y": {**y, "field": "robust_low"}, "y2": {"field": "robust_high"}}
    corners = [{"clean": a, "clean_to": b, "robust": c, "robust_to": d} for (a, b), (c, d) in frames]
    framed = {"x": x, "x2": {"field": "clean_to"}, "y": y, "y2": {"field": "robust_to"}}
    named = [row for row in inside if row["name"] not in ("", row["series"])]
    return panel(
        layer("line", steps, line, clip=True, strokeWidth=1.3),
        layer("circle", steps, place, clip=True, size=26, opacity=1),
        layer("rule", inside, across, clip=True, opacity=0.7),
        layer("rule", inside, along, clip=True, opacity=0.7),
        layer("rect", corners, framed, fillOpacity=0, stroke="#8b929b", strokeDash=[3, 3], strokeWidth=1),
        layer("point", inside, {**place, **marked}, filled=True, size=75, opacity=1),
        layer("text", named, {"x": x, "y": y, "text": {"field": "name"}}, align="left", dx=6, dy=-7),
        height=round(0.8 * PANEL),
    )


# --- histograms ------------------------------------------------------------------------------------------------------


def histograms(
    shown: Mapping[str, Mapping[str, Tensor]], *, columns: int, rules: Sequence[float] | None = None
) -> Figure:
    """Draw the margins of two groups per panel, the first group as bars and the second as an outline, over log odds.

    Args:
        shown: title of a panel -> name of a group -> log(1 - margin) of each image. All panels have the same two names.
        rules: log(1 - margin) of the line in each panel; by default, each group has a line at its median.
    """
    drawn = [
        _histogram(title, groups, rules[i] if rules else None, legend=i == 0)
        for i, (title, groups) in enumerate(shown.items())
    ]
    return Figure(drawn, columns=columns)


def _histogram(title: str, groups: Mapping[str, Tensor], rule: float | None, *, legend: bool) -> Spec:
    filled, outline = groups
    odds = {name: _log_odds(group.double().numpy()) for name, group in groups.items()}
    if rule is None:
        at = {name: float(np.median(values)) for name, values in odds.items() if values.size}
    else:
        at = {"": float(_log_odds(np.array(rule)))}
    edges = _edges(np.concatenate([*odds.values()]), [*at.values()])
    rows = {name: _bins(name, values, edges) for name, values in odds.items()}
    across = number("left", "margin", type="symlog", domain=[edges[0], edges[-1]])
    across["axis"] = {"values": _ticks(edges), "labelOverlap": True, "labelSeparation": 6, "labelExpr": _FROM_ODDS}
    up = number("share", "share of images (%)", zero=True)
    common = {"x": across, "color": colors(list(groups), RIGHT_AND_WRONG, legend=legend, symbolType="stroke")}
    return panel(
        layer("bar", rows[filled], {**common, "x2": {"field": "right"}, "y": up, "y2": {"datum": 0}}, opacity=0.6),
        layer("line", rows[outline], {**common, "y": up}, interpolate="step-after", strokeWidth=1.3, strokeDash=[4, 2]),
        layer("rule", [{"series": name, "left": place} for name, place in at.items()],
              common if rule is None else {"x": across}, strokeWidth=1.5),
        title=title, height=round(0.5 * PANEL),
    )  # fmt: skip


# 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-3, ... for log10(m / (1 - m)) = -2, -1, 0, 1, 2, 3, ...
_FROM_ODDS = (
    "datum.value < 0 ? format(pow(10, datum.value), '~g') : datum.value == 0 ? '0.5' : "
    "datum.value < 3 ? format(1 - pow(10, -datum.value), '~g') : '1−1e-' + datum.value"
)


def _log_odds(log_distances: _Numbers) -> _Numbers:
    """Return log10(m / (1 - m)) from log(1 - m), finite even for margins that are close to 0 or to 1."""
    odds: _Numbers = (np.log(np.maximum(-np.expm1(log_distances), 1e-30)) - log_distances) / math.log(10)
    return odds


def _edges(odds: _Numbers, lines_at: Sequence[float]) -> _Numbers:
    """Return the edges of bins that are equally wide on the drawn axis; the first and last bin hold 1% and more."""
    low, high = np.quantile(odds, (0.01, 0.99)) if odds.size else (-1.0, 1.0)
    ends = np.array([min([low, *lines_at]) - 0.2, max([high, *lines_at]) + 0.2])
    first, last = np.sign(ends) * np.log1p(abs(ends))  # the scale of the drawn axis
    drawn = np.linspace(first, last, _BINS + 1)
    edges: _Numbers = np.sign(drawn) * np.expm1(abs(drawn))
    return edges


def _ticks(edges: _Numbers) -> list[float]:
    """Return log odds with growing distances."""
    steps = (1, 2, 5) if edges[-1] < 20 else (1,)
    apart = [step * 10.0**k for k in range(7) for step in steps]
    return [n for n in (*(-n for n in reversed(apart)), 0.0, *apart) if edges[0] <= n <= edges[-1]]


def _bins(name: str, odds: _Numbers, edges: _Numbers) -> list[Row]:
    """Return the share of a group in each bin, and the last share once more at the end of the outline."""
    if not odds.size:
        return []
    shares = 100 * np.histogram(odds.clip(edges[0], edges[-1]), bins=edges)[0] / odds.size
    ends = [float(f"{edge:.4g}") for edge in edges]
    steps = zip(ends, [*ends[1:], ends[-1]], [*shares.tolist(), shares[-1]], strict=True)
    return [{"series": name, "left": left, "right": right, "share": share} for left, right, share in steps]


# --- maps ------------------------------------------------------------------------------------------------------------


def maps(
    objectives: Mapping[tuple[float, float, float], float | None],
    *,
    chosen: tuple[float, float, float],
    meaning: str,
    maximized: bool,
) -> Figure:
    """Draw the objective over s (across) and c (up), one map per p, on one color scale; darker is better.

    Args:
        objectives: (s, p, c) -> share of images in [0, 1], or None for a candidate that cannot be used.
        chosen: the candidate that gets a ring.
        meaning: what the objective is.
    """
    found = [100 * value for value in objectives.values() if value is not None]
    ends = [min(found, default=0.0), max(found, default=1.0)]
    scale = {"scheme": "viridis", "reverse": maximized, "domain": ends, "nice": False}
    title = [f"{meaning} (%)", "(darker is better)"]
    legend = {"title": title, "gradientLength": 170, "titleLimit": 0, "format": ".3~g"}
    color: Row = {"field": "objective", "type": "quantitative", "scale": scale}
    panels = list[Spec]()
    for shown in _shown_powers(sorted({p for _, p, _ in objectives}), chosen[1]):
        rows = [
            {"s": s, "p": p, "c": c, "objective": None if value is None else 100 * value}
            for (s, p, c), value in objectives.items()
            if p == shown
        ]
        selected = [{"s": chosen[0], "c": chosen[2]}] if shown == chosen[1] else []
        panels.append(_map(rows, selected, {**color, "legend": None if panels else legend}))
    return Figure(panels, columns=4)


def _shown_powers(powers: Sequence[float], chosen: float) -> Sequence[float]:
    """Return all powers, or an even choice of them with the chosen one among them."""
    if len(powers) <= _MOST_MAPS:
        return powers
    picked = {powers[round(i * (len(powers) - 1) / (_MOST_MAPS - 1))] for i in range(_MOST_MAPS)}
    return sorted((picked - {min(picked, key=lambda power: abs(power - chosen))}) | {chosen})


def _map(rows: Sequence[Row], selected: Sequence[Row], color: Row) -> Spec:
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
    place = {"x": x, "y": y}
    return panel(
        layer("rect", usable, {**place, "color": color}),
        layer("text", unusable, {**place, "text": {"value": "×"}}, opacity=0.6),
        layer("point", selected, place, size=70, stroke="#ffffff", strokeWidth=4),
        layer("point", selected, place, size=70, stroke="#cb5a1d", strokeWidth=2),
        title=f"p = {rows[0]['p']:.4g}", width=160, height=130,
    )  # fmt: skip

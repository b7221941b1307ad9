"""The few kinds of chart that the studies draw, in the style of the reports."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from ..reports.chart_style import text_layer, values
from ..reports.intervals import Count

Point = tuple[str, Count, Count]  # name, clean, robust
_Place = tuple[str, int, int]  # of a label beside its mark: alignment, dx, dy
_Box = tuple[NDArray[np.float64], NDArray[np.float64]]  # its corners, in pixels

_WIDTH, _HEIGHT = 440, 300
_LETTER_WIDTH, _LETTER_HEIGHT = 6.5, 14.0  # of text_layer, about
_BESIDE: tuple[_Place, ...] = (("left", 8, -9), ("left", 8, 9), ("right", -8, -9), ("right", -8, 9))
_MARK_RADIUS = 5
_PALETTE = ("#2f7fc1", "#cb5a1d", "#0f8f84", "#8a5fb0", "#b5761a", "#7b8087", "#b0457a", "#4c6a2e")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")


def accuracy_chart(
    series: Mapping[str, Sequence[Point]], *, curves: Mapping[str, Sequence[tuple[float, float]]] | None = None
) -> alt.TopLevelMixin:
    """Clean against robust accuracy in percent: marks with 95 % whiskers, one colour and shape a series, curves behind.

    Args:
        series: measured points by series.
        curves: (clean %, robust %) by the same series' names, drawn as lines.
    """
    rows = [_point_row(name, point) for name, points in series.items() for point in points]
    names = list(dict.fromkeys([*series, *(curves or {})]))
    x, y = _axis("clean", "clean accuracy (%)"), _axis("robust", "robust accuracy (%)")
    colour = _colour(names)
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names, range=list(_SHAPES[: len(names)])), title=None)
    data = values(rows)
    rule = alt.Chart(data).mark_rule(opacity=0.6)
    layers = [
        rule.encode(x=alt.X("clean_low:Q"), x2="clean_high:Q", y=y, color=colour),
        rule.encode(x=x, y=alt.Y("robust_low:Q"), y2="robust_high:Q", color=colour),
        alt.Chart(data).mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=colour, shape=shape),
    ]
    for (align, dx, dy), labels in _placed(_labels(rows), rows).items():
        layers.append(text_layer(values(labels), align=align, dx=dx, dy=dy).encode(x=x, y=y, text="name:N"))
    if curves:
        steps = [{"series": name, "clean": clean, "robust": robust, "order": i}
                 for name, curve in curves.items() for i, (clean, robust) in enumerate(curve)]  # fmt: skip
        line = alt.Chart(values(steps)).mark_line(strokeWidth=1.3)
        layers.insert(0, line.encode(x=x, y=y, color=colour, order="order:Q"))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def bar_chart(rows: Sequence[dict[str, Any]], *, value: str, group: str = "group") -> alt.TopLevelMixin:
    """Grouped bars, `name` along the axis; rows hold `name`, `group`, `value` and, where known, `low` and `high`."""
    data = values([row for row in rows if row["value"] is not None])
    names, groups = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("name", "group"))
    x = alt.X("name:N", sort=names, title=None, axis=alt.Axis(labelAngle=0, labelLimit=150))
    offset = alt.XOffset("group:N", sort=groups)
    largest = max((row.get("high", row["value"]) for row in rows if row["value"] is not None), default=0)
    y = alt.Y("value:Q", title=value, scale=alt.Scale(domain=[0, largest or 1], nice=True))
    colour = _colour(groups, field="group", title=None if group == "group" else group)
    layers: list[alt.Chart] = [alt.Chart(data).mark_bar().encode(x=x, y=y, xOffset=offset, color=colour)]
    if all("low" in row for row in rows):
        rule = alt.Chart(data).mark_rule(strokeWidth=1.5, color="#57606a")
        layers.append(rule.encode(x=x, xOffset=offset, y=alt.Y("low:Q"), y2="high:Q"))
    width = max(_WIDTH, 34 * len(names) * max(1, len(groups)))
    return alt.layer(*layers).properties(width=min(width, 900), height=_HEIGHT)


def line_chart(rows: Sequence[dict[str, Any]], *, x: str, y: str, log_x: bool = False) -> alt.TopLevelMixin:
    """Lines with marks; rows hold `x`, `y`, `series` and, where known, `low` and `high` for a band."""
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    data, colour = values(list(rows)), _colour(names)
    horizontal = alt.X("x:Q", title=x, scale=alt.Scale(type="log" if log_x else "linear", zero=False, nice=False))
    vertical = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False))
    base = alt.Chart(data)
    layers: list[alt.Chart] = [
        base.mark_line(strokeWidth=1.5).encode(x=horizontal, y=vertical, color=colour),
        base.mark_point(filled=True, size=30, opacity=1).encode(x=horizontal, y=vertical, color=colour),
    ]
    if all("low" in row for row in rows):
        band = base.mark_area(opacity=0.18).encode(x=horizontal, y=alt.Y("low:Q"), y2="high:Q", color=colour)
        layers.insert(0, band)
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def count_bars(rows: Sequence[tuple[str, str, Count]], *, value: str = "images (%)") -> alt.TopLevelMixin:
    """`bar_chart` of (name, group, count) in percent with 95 % intervals."""
    return bar_chart(
        [
            {"name": name, "group": group, "value": count.percent, "low": count.interval[0], "high": count.interval[1]}
            for name, group, count in rows
        ],
        value=value,
    )


def _point_row(series: str, point: Point) -> dict[str, Any]:
    name, clean, robust = point
    (clean_low, clean_high), (robust_low, robust_high) = clean.interval, robust.interval
    return {
        "series": series, "name": name, "clean": clean.percent, "clean_low": clean_low, "clean_high": clean_high,
        "robust": robust.percent, "robust_low": robust_low, "robust_high": robust_high,
    }  # fmt: skip


def _labels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One label a place: marks that coincide share it."""
    places: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        places.setdefault((row["clean"], row["robust"]), []).append(row["name"])
    return [
        {"clean": clean, "robust": robust, "name": ", ".join(dict.fromkeys(names))}
        for (clean, robust), names in places.items()
    ]


def _placed(labels: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> dict[_Place, list[dict[str, Any]]]:
    """Labels by their place: one after the other where it covers least of what is there."""
    ends = [(row[f"clean_{end}"], row[f"robust_{end}"]) for row in rows for end in ("low", "high")]
    lows, highs = np.min(ends, axis=0), np.max(ends, axis=0)
    per_percent = np.array([_WIDTH, -_HEIGHT]) / np.maximum(highs - lows, 1e-9)  # pixels; y runs downwards

    def pixels(point: dict[str, Any]) -> NDArray[np.float64]:
        at: NDArray[np.float64] = np.array([point["clean"], point["robust"]]) * per_percent
        return at

    marks = [pixels(row) for row in rows]
    taken = [(mark - _MARK_RADIUS, mark + _MARK_RADIUS) for mark in marks]
    placed: dict[_Place, list[dict[str, Any]]] = {}
    for label in labels:
        mark = pixels(label)
        boxes = {place: _box(mark, label["name"], place) for place in _BESIDE}
        place = min(_BESIDE, key=lambda place: sum(_overlap(boxes[place], other) for other in taken))
        taken.append(boxes[place])
        placed.setdefault(place, []).append(label)
    return placed


def _box(mark: NDArray[np.float64], text: str, place: _Place) -> _Box:
    """What a label covers, about."""
    align, dx, dy = place
    width = _LETTER_WIDTH * len(text)
    centre = mark + np.array([dx + (width / 2 if align == "left" else -width / 2), dy])
    half = np.array([width, _LETTER_HEIGHT]) / 2
    return centre - half, centre + half


def _overlap(one: _Box, other: _Box) -> float:
    """The area that both cover."""
    return float(np.prod(np.maximum(0, np.minimum(one[1], other[1]) - np.maximum(one[0], other[0]))))


def _axis(field: str, title: str) -> Any:
    encoding = alt.X if field == "clean" else alt.Y
    axis = alt.Axis(labelExpr="datum.value < 0 || datum.value > 100 ? '' : datum.label")
    return encoding(f"{field}:Q", title=title, scale=alt.Scale(zero=False, padding=12), axis=axis)


def _colour(names: Sequence[str], *, field: str = "series", title: str | None = None) -> alt.Color:
    scale = alt.Scale(domain=list(names), range=list(_PALETTE[: len(names)]))
    legend = alt.Legend(title=title, orient="top", columns=3, labelLimit=260) if len(names) > 1 else None
    return alt.Color(f"{field}:N", scale=scale, legend=legend)

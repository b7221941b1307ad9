"""Clean against robust accuracy: marks with whiskers and labels, curves behind them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from .counts import Count
from .drawing import Chart, Drawn, Frame, Row, Span, heading, key, layered, values


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
    width = 0.55 * font * (len(text) + 1)  # with a space behind it: 1 beside 1 is not 11
    left = x + dx - {"left": 0.0, "right": width, "center": width / 2}[align]
    return left, y + dy - 0.6 * font, left + width, y + dy + 0.6 * font


def _overlap(one: Box, other: Box) -> float:
    """The area that both cover."""
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _outside(box: Box, size: tuple[int, int]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, (0, 0, *size))

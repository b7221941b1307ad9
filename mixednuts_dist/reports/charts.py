"""The other kinds of chart that reports and studies draw: lines, bars, histograms, maps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt

from .counts import Count
from .drawing import (
    CLASSIFIER_COLOURS,
    PALETTE,
    Chart,
    Drawn,
    Frame,
    Row,
    Span,
    at_x,
    heading,
    key,
    layered,
    panelled,
    values,
)

DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3])
RIGHT_AND_WRONG = {"right": "#0f8f84", "wrong": "#b5761a"}


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
        ticks = alt.Axis(tickCount=6, labelOverlap=True, labelSeparation=6)
        across: Any = alt.X("x:Q", title=x, scale=scale, axis=ticks)
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


def count_bars(rows: Sequence[tuple[str, str, Count]], *, value: str = "images right (%)") -> Chart:
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
        odds: edges are x = log10(m / (1 - m)) of margins m, drawn at log(1 + |x|) to either side of m = 1/2: M takes
            margins to 1 - 1e-1000 and leaves some near 0; else they are margins above 0, on a logarithmic axis.
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
    scale = alt.Scale(type="symlog" if odds else "log", domain=[edges[0], edges[-1]], nice=False)
    labels: Row = {"labelExpr": _FROM_ODDS} if odds else {"format": "~g"}
    axis = alt.Axis(values=_ticks(edges, odds=odds), labelOverlap=True, labelSeparation=6, **labels)
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


def _ticks(edges: Sequence[float], *, odds: bool) -> list[float]:
    """Where the axis has ticks: at decades of the margin; of odds that reach far out, at 1, 10, 100 decades."""
    if not odds:
        return [10.0**n for n in range(math.ceil(math.log10(edges[0]) - 1e-9), math.floor(math.log10(edges[-1])) + 1)]
    steps = (1, 2, 5) if edges[-1] < 20 else (1,)
    apart = [step * 10.0**k for k in range(7) for step in steps]
    return [n for n in (*(-n for n in reversed(apart)), 0.0, *apart) if edges[0] <= n <= edges[-1]]


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
        words = [f"{meaning};", "darker is better"]  # a key wider than its frame leaves the maps no room
        legend = alt.Legend(
            title=words if frame.narrow else " ".join(words), orient="top", gradientLength=16 * frame.font,
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
            format=".2~r",
            labels=shown,
            labelOverlap=True,
            labelSeparation=6,
            labelAngle=0,
            grid=False,
            ticks=False,
            domain=False,
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

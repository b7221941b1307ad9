"""Clean against robust accuracy: the predicted curve over all betas, and what was measured."""

from dataclasses import dataclass
from typing import Any

import altair as alt

from .chart_style import CLASSIFIER_COLOURS, Layout, text_layer, values
from .intervals import Count
from .results import MIXED_ATTACK, RunResults

SELECTED_BETA = "selected_beta"  # the signal that the page's slider sets
_SHAPES = {"std": "square", "rob": "triangle-up", "mixed": "circle", "other": "diamond"}


@dataclass(frozen=True)
class Window:
    """The part of the plane that a panel shows, in percent."""

    clean: tuple[float, float]
    robust: tuple[float, float]

    def holds(self, point: dict[str, Any]) -> bool:
        """Whether the point lies in it."""
        (left, right), (bottom, top) = self.clean, self.robust
        return bool(left <= point["clean"] <= right and bottom <= point["robust"] <= top)

    def x(self, field: str = "clean") -> alt.X:
        """The horizontal axis of this window, for `field`."""
        return alt.X(f"{field}:Q", title="clean accuracy (%)", scale=_scale(self.clean), axis=_axis())

    def y(self, field: str = "robust") -> alt.Y:
        """The vertical axis of this window, for `field`."""
        return alt.Y(f"{field}:Q", title="robust accuracy (%)", scale=_scale(self.robust), axis=_axis())


def tradeoff_chart(results: RunResults, layout: Layout) -> alt.TopLevelMixin:
    """Two panels: everything from 0 up, and the part around the curve that decides."""
    curve, points = _curve_rows(results), _point_rows(results)
    close = _close_window(curve, points)
    size = {"wide": 320, "narrow": 265}[layout]
    left = min(close.clean[0], *(point["clean_low"] for point in points))
    whole = Window((max(-4.0, left - 4), 104), (-4, 104))  # marks at 0 and at 100 are drawn whole
    overview = _panel(curve, points, whole, size, "The whole range (frame: the other panel)", frame=close)
    detail = _panel(curve, points, close, size, "Around the curve")
    chosen = alt.param(name=SELECTED_BETA, value=results.parameters.beta)
    columns = {"wide": 2, "narrow": 1}[layout]
    chart = alt.concat(overview, detail, columns=columns, spacing=72, bounds="flush").add_params(chosen)
    return chart.properties(description=tradeoff_description(results))


def tradeoff_description(results: RunResults) -> str:
    """The chart in words, for who cannot see it."""
    first, last = results.search.entries[0], results.search.entries[-1]
    mixed, rob, std = results.row("mixed"), results.row("rob"), results.row("std")
    return (
        f"Clean against robust accuracy. Measured: std {_pair(std.clean, std.robust)}, "
        f"rob {_pair(rob.clean, rob.robust)}, mixed {_pair(mixed.clean, mixed.robust)}. The predicted curve runs from "
        f"{_pair(Count(first.clean_correct, first.total), Count(first.kept_predicted, first.total))} at beta "
        f"{first.beta:g} to "
        f"{_pair(Count(last.clean_correct, last.total), Count(last.kept_predicted, last.total))} at beta "
        f"{last.beta:g}."
    )


def _pair(clean: Count, robust: Count) -> str:
    return f"{clean.percent:.1f} % clean and {robust.percent:.1f} % robust"


def _curve_rows(results: RunResults) -> list[dict[str, Any]]:
    return [
        {
            "beta": entry.beta,
            "s": entry.scale,
            "p": entry.power,
            "c": entry.bias,
            "alpha": entry.alpha,
            "clean": 100 * entry.clean_correct / entry.total,
            "robust": 100 * entry.kept_predicted / entry.total,
            **_edges("clean", entry.clean_interval),
            **_edges("robust", entry.kept_interval),
        }
        for entry in results.search.entries
    ]


def _edges(name: str, interval: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": 100 * interval[0], f"{name}_high": 100 * interval[1]}


def _point_rows(results: RunResults) -> list[dict[str, Any]]:
    """The three classifiers of this run, then the mixtures that other runs measured at other parameters."""
    own = [
        {"classifier": row.classifier, "mark": row.classifier, "label": row.classifier, "attack": row.attack,
         **_with_whiskers(row.clean, row.robust)}
        for row in results.accuracy
    ]  # fmt: skip
    others = [
        {"classifier": "mixed", "mark": "other", "label": f"β {point.parameters.beta:g}", "attack": MIXED_ATTACK,
         "run": point.run_id, **_with_whiskers(point.clean, point.robust)}
        for point in results.measured
        if point.run_id != results.run_id
    ]  # fmt: skip
    return [*own, *others]


def _with_whiskers(clean: Count, robust: Count) -> dict[str, float]:
    (clean_low, clean_high), (robust_low, robust_high) = clean.interval, robust.interval
    return {
        "clean": clean.percent,
        "clean_low": clean_low,
        "clean_high": clean_high,
        "robust": robust.percent,
        "robust_low": robust_low,
        "robust_high": robust_high,
    }


def _close_window(curve: list[dict[str, Any]], points: list[dict[str, Any]]) -> Window:
    """Holds rob and mixed with their intervals and the curve as far down as 15 points below the mixture."""
    near = [point for point in points if point["mark"] in ("rob", "mixed")]
    floor = min(point["robust_low"] for point in near) - 10
    shown = [entry for entry in curve if entry["robust"] >= floor]
    clean = [entry["clean"] for entry in shown] + [
        point[edge] for point in near for edge in ("clean_low", "clean_high")
    ]
    robust = [entry["robust"] for entry in shown] + [
        point[edge] for point in near for edge in ("robust_low", "robust_high")
    ]
    return Window(_padded(clean), _padded(robust))


def _padded(numbers: list[float]) -> tuple[float, float]:
    return max(0.0, min(numbers) - 1.5), min(100.0, max(numbers) + 1.5)


def _panel(
    curve: list[dict[str, Any]],
    points: list[dict[str, Any]],
    window: Window,
    size: int,
    title: str,
    frame: Window | None = None,
) -> alt.LayerChart | alt.FacetChart:
    named = [point for point in points if point["mark"] != "other" or frame is None or not frame.holds(point)]
    layers = [*_whiskers(points, window), *_curve_layers(curve, window), *_point_layers(points, window)]
    layers += [_label(point, window) for point in named]
    if frame is not None:
        layers.append(_frame(frame))
    return alt.layer(*layers).properties(width=size, height=size, title=title)


def _scale(domain: tuple[float, float]) -> alt.Scale:
    return alt.Scale(domain=list(domain), nice=False, zero=False)


def _axis() -> alt.Axis:
    """No number where the window reaches beyond 0 or 100 for the marks' sake."""
    return alt.Axis(labelExpr="datum.value < 0 || datum.value > 100 ? '' : datum.label")


def _curve_layers(curve: list[dict[str, Any]], window: Window) -> list[alt.Chart]:
    colour = CLASSIFIER_COLOURS["mixed"]
    base = alt.Chart(values(curve)).encode(x=window.x(), y=window.y())
    tooltip = [
        alt.Tooltip(f"{name}:Q", title=title, format=number)
        for name, title, number in (
            ("beta", "beta", ".4~g"),
            ("s", "s", ".4~g"),
            ("p", "p", ".4~g"),
            ("c", "c", ".4~g"),
            ("alpha", "alpha", ".6~g"),
            ("clean", "predicted clean (%)", ".1f"),
            ("robust", "guaranteed robust (%)", ".1f"),
        )
    ]
    at_beta = base.transform_filter(f"datum.beta === {SELECTED_BETA}")
    bar = at_beta.mark_rule(clip=True, color=colour, strokeWidth=1.5, strokeDash=[2, 2])
    return [
        base.mark_line(clip=True, color=colour, strokeWidth=1.5).encode(order="beta:Q"),
        base.mark_point(clip=True, color=colour, filled=True, size=22, opacity=1).encode(tooltip=tooltip),
        bar.encode(x=window.x("clean_low"), x2="clean_high:Q"),
        bar.encode(y=window.y("robust_low"), y2="robust_high:Q"),
        at_beta.mark_point(clip=True, color=colour, filled=False, size=190, strokeWidth=2.5, opacity=1).encode(
            tooltip=tooltip
        ),
    ]


def _whiskers(points: list[dict[str, Any]], window: Window) -> list[alt.Chart]:
    rule = alt.Chart(values(points)).mark_rule(clip=True, opacity=0.75).encode(color=_colour())
    return [
        rule.encode(x=window.x("clean_low"), x2="clean_high:Q", y=window.y()),
        rule.encode(x=window.x(), y=window.y("robust_low"), y2="robust_high:Q"),
    ]


def _point_layers(points: list[dict[str, Any]], window: Window) -> list[alt.Chart]:
    shape = alt.Shape("mark:N", scale=alt.Scale(domain=list(_SHAPES), range=list(_SHAPES.values())), legend=None)
    tooltip = [
        alt.Tooltip("label:N", title="measured"),
        alt.Tooltip("clean:Q", title="clean (%)", format=".2f"),
        alt.Tooltip("robust:Q", title="robust (%)", format=".2f"),
        alt.Tooltip("attack:N", title="attack"),
        alt.Tooltip("run:N", title="run"),
    ]
    marks = alt.Chart(values(points)).mark_point(clip=True, filled=True, size=85, opacity=1)
    return [marks.encode(x=window.x(), y=window.y(), shape=shape, color=_colour(), tooltip=tooltip)]


def _label(point: dict[str, Any], window: Window) -> alt.Chart:
    """The name beside its mark, on the side where neither the curve nor the next mark is."""
    side = {"rob": {"dx": -9, "dy": 12, "align": "right"}, "std": {"dx": -9, "dy": -11, "align": "right"}}
    beside = side.get(point["mark"], {"dx": 9, "dy": -11, "align": "left"})
    weight = 400 if point["mark"] == "other" else 600
    label = text_layer(values([point]), clip=True, fontWeight=weight, **beside)
    encoded: alt.Chart = label.encode(x=window.x(), y=window.y(), text="label:N")
    return encoded


def _colour() -> alt.Color:
    scale = alt.Scale(domain=list(CLASSIFIER_COLOURS), range=list(CLASSIFIER_COLOURS.values()))
    return alt.Color("classifier:N", scale=scale, legend=None)


def _frame(window: Window) -> alt.Chart:
    corners = {
        "clean": window.clean[0],
        "clean_to": window.clean[1],
        "robust": window.robust[0],
        "robust_to": window.robust[1],
    }
    frame = alt.Chart(values([corners])).mark_rect(fillOpacity=0, stroke="#8b929b", strokeDash=[3, 3], strokeWidth=1)
    encoded: alt.Chart = frame.encode(x="clean:Q", x2="clean_to:Q", y="robust:Q", y2="robust_to:Q")
    return encoded

"""The figures by name, and their static SVG, PNG and PDF. A new figure is a function and one line in `FIGURES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

from .chart_style import Layout, dark_config, light_config
from .margin_chart import margin_chart
from .results import RunResults
from .sensitivity_chart import sensitivity_chart
from .survival_chart import survival_chart
from .tradeoff_chart import tradeoff_chart

PNG_SCALE = 2.0  # 144 dpi: sharp on paper at column width


@dataclass(frozen=True)
class Figure:
    """How a figure is drawn and what stands under it."""

    draw: Callable[[RunResults, Layout], alt.TopLevelMixin]
    caption: str
    drawable: Callable[[RunResults], bool] = lambda _: True  # whether the run has what it shows


FIGURES: Mapping[str, Figure] = {
    "tradeoff": Figure(
        tradeoff_chart,
        "Line: what the search predicts for every beta without a new attack, exact clean accuracy against the robust "
        "accuracy that is guaranteed under the stored perturbations. Ring: the beta of the slider, dotted: its 95 % "
        "bootstrap interval. Marks with whiskers: measured, with 95 % intervals; diamonds are other parameters, "
        "measured in runs beside this one.",
    ),
    "margins": Figure(
        margin_chart,
        "Share of each group's images by confidence margin (top probability minus runner-up). Bars: prediction right. "
        "Dashed outline: prediction wrong. Vertical lines: medians. Each panel has its own vertical scale.",
    ),
    "sensitivity": Figure(
        sensitivity_chart,
        "The search’s objective over scale s and bias c, one map for each power p, at the deployed beta. Darker is "
        "better; the ring is what was selected; × cannot be used. A wide dark region means that the exact values "
        "hardly matter, a dark cell at the border that the grid should be wider.",
        lambda results: bool(results.candidates),
    ),
    "survival": Figure(
        survival_chart,
        "Images that the mixture still has right after each step; in brackets, how many the step took. Each step "
        "attacks only what is still standing.",
    ),
}


def build_figures(results: RunResults, *, layout: Layout = "wide") -> dict[str, alt.TopLevelMixin]:
    """Every figure that the run has something for, by name, drawn for a desktop column or for a phone."""
    return {name: figure.draw(results, layout) for name, figure in FIGURES.items() if figure.drawable(results)}


def figure_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as a Vega-Lite specification without any address in it: `$schema` is the only one Altair writes."""
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return spec


def static_files(name: str, wide: dict[str, Any], narrow: dict[str, Any]) -> dict[str, bytes]:
    """The figure in every static form, by file name; drawn in this process, no browser and no network."""
    svg = static_svg(wide)
    return {
        f"{name}.svg": svg,
        f"{name}.png": vl_convert.svg_to_png(svg.decode(), scale=PNG_SCALE),
        f"{name}.pdf": vl_convert.svg_to_pdf(svg.decode()),
        f"{name}-narrow.svg": static_svg(narrow),
        f"{name}-dark.svg": static_svg(wide, dark_config()),
    }


def static_svg(spec: dict[str, Any], config: dict[str, Any] | None = None) -> bytes:
    """The figure as SVG, on white by default."""
    svg: str = vl_convert.vegalite_to_svg(spec, config=config or light_config(), allowed_base_urls=[])
    return svg.encode()


def static_png(spec: dict[str, Any]) -> bytes:
    """The figure as PNG on white."""
    png: bytes = vl_convert.svg_to_png(static_svg(spec).decode(), scale=PNG_SCALE)
    return png

"""The figures by name, and their static SVG and PNG. A new figure is a function and one line in `FIGURES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

from .chart_style import Layout, light_config
from .margin_chart import margin_chart
from .results import RunResults
from .survival_chart import survival_chart
from .tradeoff_chart import tradeoff_chart

PNG_SCALE = 2.0  # 144 dpi: sharp on paper at column width


@dataclass(frozen=True)
class Figure:
    """How a figure is drawn and what stands under it."""

    draw: Callable[[RunResults, Layout], alt.TopLevelMixin]
    caption: str


FIGURES: Mapping[str, Figure] = {
    "tradeoff": Figure(
        tradeoff_chart,
        "Line: what the search predicts for every beta without a new attack, exact clean accuracy against the robust "
        "accuracy that is guaranteed under the stored perturbations. Ring: the selected beta. Marks with whiskers: "
        "measured, with 95 % intervals.",
    ),
    "margins": Figure(
        margin_chart,
        "Share of each group's images by confidence margin (top probability minus runner-up). Bars: prediction right. "
        "Dashed outline: prediction wrong. Vertical lines: medians. Each panel has its own vertical scale.",
    ),
    "survival": Figure(
        survival_chart,
        "Images that the mixture still has right after each step; in brackets, how many the step took. Each step "
        "attacks only what is still standing.",
    ),
}


def build_figures(results: RunResults, *, layout: Layout = "wide") -> dict[str, alt.TopLevelMixin]:
    """Every figure by name, drawn for a desktop column or for a phone."""
    return {name: figure.draw(results, layout) for name, figure in FIGURES.items()}


def figure_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as a Vega-Lite specification without any address in it: `$schema` is the only one Altair writes."""
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    return spec


def static_svg(spec: dict[str, Any]) -> bytes:
    """The figure as SVG on white; drawn in this process, no browser and no network."""
    svg: str = vl_convert.vegalite_to_svg(spec, config=light_config(), allowed_base_urls=[])
    return svg.encode()


def static_png(spec: dict[str, Any]) -> bytes:
    """The figure as PNG on white."""
    png: bytes = vl_convert.vegalite_to_png(spec, config=light_config(), scale=PNG_SCALE, allowed_base_urls=[])
    return png

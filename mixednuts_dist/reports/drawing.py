"""Draw figures, which consist of Vega-Lite panels, as SVG for the page and as one PDF for a paper.

A panel is a Vega-Lite specification with a fixed plot size, written as a plain dict. `to_dict()` of an Altair chart
returns such a dict too. A page shows the panels next to each other or below each other, as its width allows.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vl_convert

Row = dict[str, Any]
Spec = dict[str, Any]
Span = tuple[float, float]

PANEL = 290  # width of a plot in pixels; with its axis it fits a phone, and two fit the page
# Each color has a contrast of at least 3:1 against both page backgrounds; a shape or a dash always accompanies it.
CLASSIFIER_COLORS = {"std": "#7b8087", "rob": "#2f7fc1", "mixed": "#cb5a1d"}
PALETTE = ("#2f7fc1", "#cb5a1d", "#0f8f84", "#8a5fb0", "#b5761a", "#7b8087", "#b0457a", "#4c6a2e")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
CLASSIFIER_MARKS = {
    name: (shape, CLASSIFIER_COLORS[name])
    for name, shape in {"std": "square", "rob": "triangle-up", "mixed": "circle"}.items()
}
INK, MUTED, LINE = "#1f2328", "#57606a", "#d5d9de"  # page.css replaces these three colors in dark mode
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
_SIZES = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "titleColor": INK}
CONFIG: Spec = {
    "background": "#ffffff",
    "font": FONT,
    "padding": 2,
    "aria": False,
    "view": {"stroke": LINE},
    "axis": {
        **_SIZES, "labelColor": MUTED, "gridColor": LINE, "gridOpacity": 0.6, "domainColor": LINE, "tickColor": LINE,
        "tickSize": 4,
    },
    "legend": {
        **_SIZES, "labelColor": INK, "orient": "top", "columns": 2, "symbolSize": 60, "labelLimit": 0, "offset": 10,
        "columnPadding": 20,
        "symbolStrokeWidth": 1.5, "symbolOpacity": 1,
    },
    "title": {"color": INK, "fontSize": 11, "fontWeight": "normal", "anchor": "start", "frame": "group"},
    "text": {"color": INK, "fontSize": 11},
    "rule": {"color": MUTED},
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """Panels that belong together."""

    panels: Sequence[Spec]
    columns: int = 2  # panels per row of the PDF

    def svgs(self, name: str) -> list[str]:
        """Draw every panel as an `<svg>` element whose ids begin with `name`, so that one page can hold many."""
        return [_svg(panel, f"{name}-{i}-") for i, panel in enumerate(self.panels)]

    def svg(self, name: str) -> str:
        """Draw all panels as one `<svg>` element."""
        if len(self.panels) == 1:
            return _svg(self.panels[0], f"{name}-")
        apart = {"color": "independent", "shape": "independent", "strokeDash": "independent"}
        concat = {"concat": list(self.panels), "columns": self.columns, "spacing": 24, "bounds": "full"}
        return _svg({**concat, "resolve": {"scale": apart}}, f"{name}-")

    def pdf(self) -> bytes:
        """Draw all panels as one PDF."""
        drawn: bytes = vl_convert.svg_to_pdf(self.svg("f"))
        return drawn


def layer(kind: str, rows: Iterable[Row], encoding: Mapping[str, Any], **mark: Any) -> Spec:
    """Return one layer: marks of a kind (`point`, `rule`, ...), one for each row."""
    return {"mark": {"type": kind, **mark}, "data": {"values": list(rows)}, "encoding": dict(encoding)}


def panel(*layers: Spec, title: str = "", width: int = PANEL, height: int = round(0.68 * PANEL)) -> Spec:
    """Return a panel of layers; the last one is drawn on top."""
    spec = {"width": width, "height": height, "layer": list(layers)}
    return {**spec, "title": title} if title else spec


def number(field: str, title: str | None = None, **scale: Any) -> Spec:
    """Return the channel of a number: its axis title and the keys of its scale."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"nice": False, "zero": False, **scale}}


def colors(names: Sequence[str], palette: Sequence[str], *, legend: bool = True, **more: Any) -> Spec:
    """Return the color channel of the field `series`: one color per name, with a legend if there are several names."""
    shown = {"title": None, **more} if legend and len(names) > 1 else None
    scale = {"domain": list(names), "range": [palette[i % len(palette)] for i in range(len(names))]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": shown}


def key(
    names: Sequence[str],
    marks: Mapping[str, tuple[str, str]] | None = None,
    *,
    legend: bool = True,
    called: Mapping[str, str] | None = None,
) -> dict[str, Spec]:
    """Return the channels color and shape of the field `series`, which share one legend.

    Args:
        marks: name -> (shape, color), by default for `std`, `rob` and `mixed`. Other names get unused marks.
        legend: False for a panel next to one that shows the legend.
        called: name -> the name to show in the legend instead.
    """
    own = {name: mark for name, mark in (marks or CLASSIFIER_MARKS).items() if name in names}
    taken = {part for mark in own.values() for part in mark}
    shapes, palette = ([each for each in every if each not in taken] for every in (SHAPES, PALETTE))
    others = enumerate(name for name in names if name not in own)
    found = own | {name: (shapes[i % len(shapes)], palette[i % len(palette)]) for i, name in others}
    shown = {"labelExpr": f"{json.dumps(dict(called))}[datum.label] || datum.label"} if called else {}
    color = colors(names, [found[name][1] for name in names], legend=legend, **shown)
    scale = {"domain": list(names), "range": [found[name][0] for name in names]}
    return {"color": color, "shape": {**color, "scale": scale}}


def _svg(spec: Spec, prefix: str) -> str:
    """Draw a specification in this process, without a browser and without a network."""
    drawn: str = vl_convert.vegalite_to_svg(spec, config=CONFIG, allowed_base_urls=[])
    return re.sub(r'(\bid="|url\(#|href="#)', lambda found: found[1] + prefix, drawn)

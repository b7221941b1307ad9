"""How figures are drawn: frames, colours, keys, layers and panels, and the files of a finished figure.

A chart is a function of the frame that it is drawn for, so that the same data fill a desktop column, a phone, and a
column or a page of a paper with text of the right size. On paper one pixel is one point (1/72 inch).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode

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
            "symbolStrokeWidth": 1.5, "symbolOpacity": 1, "columnPadding": 2 * font, "rowPadding": 2, "offset": font,
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


def key(
    names: Sequence[str],
    frame: Frame,
    marks: Mapping[str, tuple[str, str]] | None = None,
    *,
    called: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
    """Colour and shape of each name, with one key for both above the chart where there are several names.

    Args:
        marks: name -> (shape, colour); those of std, rob and mixed by default, other names take the free ones in turn.
        called: name -> what the key calls it, where that is not the name.
    """
    own = {name: mark for name, mark in (marks or CLASSIFIER_MARKS).items() if name in names}
    shapes, colours = ([each for each in every if all(each not in mark for mark in own.values())] for every in _EVERY)
    others = [name for name in names if name not in own]
    drawn_as = own | {
        name: (shape, colour) for name, shape, colour in zip(others, shapes * 4, colours * 4, strict=False)
    }
    longest = max((len((called or {}).get(name, name)) for name in names), default=0)
    widest = frame.font * (0.55 * longest + 4)  # of an entry: its letters, its symbol, the gap
    columns = max(1, min(3, int(frame.width / widest)))
    words: Row = {"labelExpr": f"{json.dumps(dict(called))}[datum.label] || datum.label"} if called else {}
    legend = alt.Legend(title=None, orient="top", columns=columns, labelLimit=0, **words) if len(names) > 1 else None

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

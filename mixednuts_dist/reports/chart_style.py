"""What every chart shares: colours that differ in hue, lightness and shape, Vega configurations for light and dark."""

from typing import Any, Literal

import altair as alt

Layout = Literal["wide", "narrow"]  # a desktop column of about 760 px, a phone of about 340 px

# Each has a contrast of at least 3:1 against both page backgrounds; a second cue (shape, dash, label) goes with each.
CLASSIFIER_COLOURS = {"std": "#7b8087", "rob": "#2f7fc1", "mixed": "#cb5a1d"}
PREDICTION_COLOURS = {"correct": "#0f8f84", "incorrect": "#b5761a"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def light_config() -> dict[str, Any]:
    """Vega-Lite configuration for a white page and for the static figures."""
    return _config(ink="#1f2328", muted="#57606a", line="#d5d9de", background="#ffffff")


def dark_config() -> dict[str, Any]:
    """The same for a dark page."""
    return _config(ink="#e6e8eb", muted="#a3abb5", line="#3a4049", background="#15181c")


def values(rows: list[dict[str, Any]]) -> alt.InlineData:
    """Rows as inline data: a chart carries all that it shows."""
    return alt.InlineData(values=rows)


def text_layer(data: alt.InlineData, **mark: Any) -> alt.Chart:
    """Direct labels, drawn in the page's ink colour (the `text` style follows light and dark)."""
    chart: alt.Chart = alt.Chart(data).mark_text(fontSize=12, **mark)
    return chart


def _config(*, ink: str, muted: str, line: str, background: str) -> dict[str, Any]:
    return {
        "background": background,
        "font": FONT,
        "view": {"stroke": line},
        "axis": {
            "labelColor": muted,
            "titleColor": ink,
            "gridColor": line,
            "gridOpacity": 0.6,
            "domainColor": line,
            "tickColor": line,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12},
        "legend": {
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "title": {"color": ink, "fontSize": 12, "fontWeight": "normal", "anchor": "start", "frame": "group"},
        "text": {"color": ink},
    }

"""The report page: one HTML file that opens without a network, and its figures and tables as files beside it."""

import base64
import functools
import json
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..data.records import SelectedParameters
from . import wording
from .chart_style import dark_config, light_config
from .confidence import MarginGroup
from .figures import FIGURES, build_figures, figure_spec, static_png, static_svg
from .intervals import Count
from .results import RunResults
from .tables import csv_table, latex_table
from .tradeoff_chart import SELECTED_BETA

# The page may run what is written in it and show what is written in it; it may fetch nothing, from anywhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"
_MEDIA_TYPES = {"csv": "text/csv", "json": "application/json", "tex": "application/x-tex", "svg": "image/svg+xml"}


def render_page(results: RunResults) -> dict[str, bytes]:
    """Every file of `report/` by name.

    `index.html` needs none of the others; `<figure>.svg` and `<figure>.png` for each of `FIGURES`, `table.csv`,
    `table.tex` and `results.json` (`RunResults.to_json`) are for papers and scripts.
    """
    wide = {name: figure_spec(chart) for name, chart in build_figures(results, layout="wide").items()}
    narrow = {name: figure_spec(chart) for name, chart in build_figures(results, layout="narrow").items()}
    files = {
        "table.csv": csv_table(results).encode(),
        "table.tex": latex_table(results).encode(),
        "results.json": (json.dumps(results.to_json(), indent=2, allow_nan=False) + "\n").encode(),
    }
    for name, spec in wide.items():
        files[f"{name}.svg"] = static_svg(spec)
        files[f"{name}.png"] = static_png(spec)
    return {"index.html": _html(results, wide, narrow, files).encode(), **files}


def _html(
    results: RunResults, wide: dict[str, dict[str, Any]], narrow: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> str:
    facts, stops = results.to_json(), _slider_stops(results)
    scripted = {
        "specs": {"wide": wide, "narrow": narrow},
        "configs": {"light": light_config(), "dark": dark_config()},
        "curve": stops,
        "selectedBeta": SELECTED_BETA,
    }
    content = {
        "results": results,
        "facts": facts,
        "stops": stops,
        "deployed_stop": [stop["beta"] for stop in stops].index(results.parameters.beta),
        "median_rows": _median_rows(results),
        "figures": FIGURES,
        "alt_texts": {name: spec["description"] for name, spec in wide.items()},
        "stills": {name: _data_uri(f"{name}.svg", files[f"{name}.svg"]) for name in wide},
        "downloads": {name: _data_uri(name, files[name]) for name in ("table.csv", "table.tex", "results.json")},
        "data": _script_json(scripted),
        "bundle": Markup(_javascript_bundle()),
        "policy": CONTENT_SECURITY_POLICY,
        "words": wording,
    }
    return _environment().get_template("page.html.j2").render(content)


def _slider_stops(results: RunResults) -> list[dict[str, Any]]:
    """The predicted curve in the slider's order, beta growing to the right; `words` is what the page shows of each."""
    entries = sorted(results.search.entries, key=lambda entry: entry.beta)
    return [{"beta": entry.beta, "words": _stop_words(entry)} for entry in entries]


def _stop_words(entry: SelectedParameters) -> dict[str, str]:
    return {
        "beta": f"{entry.beta:g}",
        "s": f"{entry.scale:.5g}",
        "p": f"{entry.power:.5g}",
        "c": f"{entry.bias:.5g}",
        "alpha": wording.weight_text(entry.alpha, entry.one_minus_alpha),
        "one_minus_alpha": f"{entry.one_minus_alpha:.4g}",
        "clean": wording.share_text(Count(entry.clean_correct, entry.total)),
        "robust_bound": wording.share_text(Count(entry.robust_correct_bound, entry.total)),
    }


def _median_rows(results: RunResults) -> list[dict[str, Any]]:
    """One row a classifier: its groups clean right, clean wrong, attacked right, attacked wrong (None: not stored)."""
    groups: dict[tuple[str, str, bool], MarginGroup] = {
        (group.classifier, group.images, group.correct): group for group in results.margins
    }
    columns = [(images, correct) for images in ("clean", "attacked") for correct in (True, False)]
    return [
        {"classifier": classifier, "groups": [groups.get((classifier, *column)) for column in columns], "gap": gap}
        for classifier, gap in results.gaps().items()
    ]


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mixednuts_dist", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def _javascript_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that can stand inside a `<script>` element."""
    bundle: str = vl_convert.javascript_bundle(_GLOBALS)
    return bundle.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _script_json(content: Any) -> Markup:
    """Strict JSON inside a `<script>` element: no character in it can end the element or open a comment."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _data_uri(name: str, content: bytes) -> str:
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"

"""The report page: one HTML file that opens without a network, and its figures and tables as files beside it."""

import functools
import json
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import wording
from .chart_style import dark_config, light_config
from .confidence import medians_table
from .exports import exported_files
from .figures import FIGURES, build_figures, figure_spec, static_files
from .page_parts import cost_rows, data_uri, picture_groups, slider_stops
from .pictures import contact_sheet
from .results import RunResults
from .single import SingleResults
from .tradeoff_chart import SELECTED_BETA

# The page may run what is written in it and show what is written in it; it may fetch nothing, from anywhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"


def render_page(results: RunResults) -> dict[str, bytes]:
    """Every file of `report/` by name.

    `index.html` needs none of the others. For papers and scripts: each of `FIGURES` as `<figure>.svg`, `.png`, `.pdf`,
    in column width as `<figure>-narrow.svg` and on dark as `<figure>-dark.svg`; each table and each figure's data as
    `.csv` and `.tex` (`table.*` is the accuracy table); `worst_images.png`; `results.json` (`RunResults.to_json`).
    """
    wide = {name: figure_spec(chart) for name, chart in build_figures(results, layout="wide").items()}
    narrow = {name: figure_spec(chart) for name, chart in build_figures(results, layout="narrow").items()}
    files = {name: content.encode() for name, content in exported_files(results).items()}
    files["results.json"] = (json.dumps(results.to_json(), indent=2, allow_nan=False) + "\n").encode()
    for name, spec in wide.items():
        files |= static_files(name, spec, narrow[name])
    if results.worst:
        files["worst_images.png"] = contact_sheet([(i.clean_CHW, i.attacked_CHW, i.caption()) for i in results.worst])
    return {"index.html": _html(results, wide, narrow, files).encode(), **files}


def _html(
    results: RunResults, wide: dict[str, dict[str, Any]], narrow: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> str:
    stops = slider_stops(results)
    scripted = {
        "specs": {"wide": wide, "narrow": narrow},
        "configs": {"light": light_config(), "dark": dark_config()},
        "curve": stops,
        "selectedBeta": SELECTED_BETA,
    }
    content = {
        "results": results,
        "facts": results.to_json(),
        "stops": stops,
        "deployed_stop": [stop["beta"] for stop in stops].index(results.parameters.beta),
        "medians": medians_table(results.margins),
        "costs": cost_rows(results),
        "pictures": picture_groups(results),
        "figures": {name: FIGURES[name] for name in wide},
        "alt_texts": {name: spec["description"] for name, spec in wide.items()},
        "stills": {name: data_uri(f"{name}.svg", files[f"{name}.svg"]) for name in wide},
        "downloads": {name: data_uri(name, files[name]) for name in files if name.endswith(("csv", "tex", "json"))},
        "data": _script_json(scripted),
        "bundle": Markup(_javascript_bundle()),
        "policy": CONTENT_SECURITY_POLICY,
        "words": wording,
    }
    return _environment().get_template("page.html.j2").render(content)


def render_single_page(results: SingleResults) -> dict[str, bytes]:
    """`index.html` and `results.json` of AutoAttack on one classifier."""
    content = {"results": results, "words": wording, "policy": CONTENT_SECURITY_POLICY}
    page = _environment().get_template("single.html.j2").render(content)
    return {
        "index.html": page.encode(),
        "results.json": (json.dumps(results.to_json(), indent=2, allow_nan=False) + "\n").encode(),
    }


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

"""The report page: one HTML file that opens without a network, and its figures and tables as files beside it."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import vl_convert
from markupsafe import Markup

from ..selection.choice import Choice
from ..stages.stage import Certified
from . import counts
from .drawing import NARROW, WIDE, Row, chart_files, drawn, vega_config
from .figures import SELECTED_BETA, caption, figures
from .margins import split_sentence, split_table
from .results import (
    RunResults,
    candidates_sentence,
    corrected,
    kept_by_rounds,
    kept_predicted,
    predicted,
    rounds_sentence,
    rounds_table,
)
from .tables import accuracy_table, cost_table, file_name, search_table, survival_table, table_files
from .templates import data_uri, rendered
from .worst_images import SMALL, Reason, WorstImage, class_text, perturbation_png, pixels_of, png

# The page may run what is written in it and show what is written in it; it may fetch nothing, from anywhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# Charts with a place of their own on the page.
PLACED = ("tradeoff", "rounds", "margins", "sensitivity", "survival", "certified")
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"
_REASONS: dict[Reason, tuple[str, str]] = {
    "lost": (
        "Lost, though both are right on the clean image",
        "Where rob alone survives its own attack, the image is the price of mixing; these come first.",
    ),
    "narrow": ("Held by a hair", "The smallest margins that the adaptive attack left on the right side."),
}


def report_files(results: RunResults) -> dict[str, bytes]:
    """Every file of `report/` by name.

    `index.html` needs none of the others. For papers and scripts: each figure as `<figure>.svg`, on dark as
    `<figure>-dark.svg`, and with 8 pt text as `<figure>-3.25in.pdf`, `<figure>-5.5in.pdf` and `.png` (300 dpi); each
    table and each figure's data as `.csv` and `.tex` (`table.*` is the accuracy table);
    `results.json` (`RunResults.to_json`).
    """
    charts = figures(results)
    wide = {name: drawn(chart, WIDE) for name, chart in charts.items()}
    narrow = {name: drawn(chart, NARROW)[0] for name, chart in charts.items()}
    files = {name: content.encode() for name, content in table_files(results).items()}
    files["results.json"] = (json.dumps(results.to_json(), indent=2, allow_nan=False) + "\n").encode()
    for name, chart in charts.items():
        files |= chart_files(name, chart, wide[name])
    return {
        "index.html": _html(results, {name: spec for name, (spec, _) in wide.items()}, narrow, files).encode(),
        **files,
    }


def _html(results: RunResults, wide: dict[str, Row], narrow: dict[str, Row], files: dict[str, bytes]) -> str:
    stops = slider_stops(results) if results.found else []
    scripted = {
        "specs": {"wide": wide, "narrow": narrow},
        "configs": {"light": vega_config(), "dark": vega_config(dark=True)},
        "curve": stops,
        "selectedBeta": SELECTED_BETA,
    }
    content: dict[str, Any] = {
        "results": results,
        "facts": results.to_json(),
        "stops": stops,
        "alt_texts": {name: spec.get("description", caption(name)) for name, spec in wide.items()},
        "captions": {name: caption(name) for name in wide},
        "more": [name for name in wide if name not in PLACED],
        "stills": {name: data_uri(f"{name}.svg", files[f"{name}.svg"]) for name in wide},
        "downloads": {
            name: data_uri(name, files[name]) for name in files if name.endswith(("csv", "tex", "json", "pdf"))
        },
        "pictures": picture_groups(results),
        "data": _script_json(scripted),
        "bundle": Markup(_javascript_bundle()),
        "policy": CONTENT_SECURITY_POLICY,
        "words": counts,
        "file_name": file_name,
        "accuracy": accuracy_table(results),
        "survival": survival_table(results),
        "costs": cost_table(results).turned(),
    }
    if results.found:
        rounds = rounds_table(results)
        content |= {
            "deployed_stop": [stop["beta"] for stop in stops].index(results.parameters.beta),
            "betas": search_table(results.search),
            "rounds": rounds.only([*(rounds.printed or ()), "passes"]),
            "rounds_sentence": rounds_sentence(results),
            "candidates_sentence": candidates_sentence(results.search),
            "splits": split_table(results.splits),
            "split_sentence": split_sentence(results.splits),
        }
    return rendered("reports", "page.html", **content)


def slider_stops(results: RunResults) -> list[dict[str, Any]]:
    """The predicted curve in the slider's order, beta growing to the right.

    `words` is what the slider shows of each, by the element's id.
    """
    entries = sorted(results.search.entries, key=lambda entry: entry.beta)
    return [{"beta": entry.beta, "words": _stop_words(entry, results)} for entry in entries]


def _stop_words(entry: Choice, results: RunResults) -> dict[str, str]:
    clean, kept = predicted(entry)[0], kept_predicted(results, entry)
    clean_elsewhere, kept_elsewhere = corrected(results, entry)
    return {
        "beta": f"{entry.beta:g}",
        "s": counts.minus(f"{entry.scale:.5g}"),
        "p": counts.minus(f"{entry.power:.5g}"),
        "c": counts.minus(f"{entry.bias:.5g}"),
        "alpha": counts.weight_text(entry.alpha, entry.one_minus_alpha),
        "one_minus_alpha": f"{entry.one_minus_alpha:.4g}",
        "clamp": entry.clamp,
        "clean": counts.percent_first(clean),
        "kept_predicted": counts.percent_first(kept),
        "clean_beyond": _beyond(clean, clean_elsewhere),
        "kept_beyond": _beyond(kept, kept_elsewhere),
        "measured": _measured_words(entry, results),
        **({"certified": _certified_words(entry, results.certified)} if results.certified else {}),
    }


def _certified_words(entry: Choice, found: Certified) -> str:
    counted = zip(found.radii.values(), found.by_beta[entry.beta], strict=True)
    return "; ".join(f"{counts.percent_first(counts.Count(n, found.total))} at {words}" for words, n in counted)


def _beyond(shown: counts.Count, elsewhere: float | None) -> str:
    """What a prediction is worth: its interval, and what to expect on images that the search has not seen."""
    expected = "" if elsewhere is None else f"; on other images about {elsewhere:.{shown.decimals}f}\u00a0%"
    return f"95\u00a0% interval {counts.interval_text(shown)}{expected}"


def _measured_words(entry: Choice, results: RunResults) -> str:
    """What is known of exactly these parameters, from this run's attack or a round of its search."""
    if results.kept is not None and entry == results.parameters:
        clean = counts.percent_first(results.row("mixed").clean)
        return f"clean {clean}, kept {counts.percent_first(results.kept)}, by the whole adaptive attack"
    by_rounds = kept_by_rounds(results.search)
    if entry.beta in by_rounds:
        return f"kept {counts.percent_first(by_rounds[entry.beta])}, by the search’s own attack"
    return "not attacked yet"


def picture_groups(results: RunResults) -> list[dict[str, Any]]:
    """The worst images by reason: a title, what to see, and the cards."""
    groups: list[dict[str, Any]] = []
    for reason, (title, hint) in _REASONS.items():
        cards = [
            _card(image, results.class_names, _bracket(image, results))
            for image in results.worst
            if image.reason == reason
        ]
        groups.append({"title": title, "hint": hint if cards else "None.", "cards": cards})
    return groups


def _bracket(image: WorstImage, results: RunResults) -> str:
    """Between what is certified of the image and what an attack found; nothing where nothing was certified."""
    found = results.certified
    if found is None:
        return ""
    reach = found.reach[image.sample_id]
    words = found.radii.get(reach, f"{reach:.3f}")
    proven = f"certified up to {found.norm} {words}" if reach > 0 else f"not certified at any {found.norm} radius"
    return f"Bracket: {proven}; {'lost' if image.reason == 'lost' else 'held'} under attack at {results.threat}."


def _card(image: WorstImage, class_names: Sequence[str], bracket: str = "") -> dict[str, Any]:
    clean_CHW, attacked_CHW = pixels_of(image)
    perturbation, factor = perturbation_png(clean_CHW, attacked_CHW)
    name = f"Image {image.sample_id}, class {class_text(image.label, class_names)}"
    *before, after = image.verdicts
    taken_for = class_text(after.predicted, class_names)
    return {
        "title": name,
        "kind": "pixels" if max(clean_CHW.shape[1:]) <= SMALL else "photo",
        "pictures": [
            ("clean", data_uri("a.png", png(clean_CHW)), f"{name}: the clean image"),
            (
                f"change × {factor:.3g}", data_uri("a.png", perturbation),
                f"{name}: the perturbation, {factor:.3g} times amplified around mid-grey",
            ),
            (
                "attacked", data_uri("a.png", png(attacked_CHW)),
                f"{name}: the attacked image, which the mixture takes for class {taken_for}",
            ),
        ],
        "sentence": image.sentence(class_names),
        "bracket": bracket,
        "verdicts": [
            (f"{verdict.classifier}, {verdict.images}", verdict.words(class_names), verdict.predicted != image.label)
            for verdict in (*before, after)
        ],
    }  # fmt: skip


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

"""The report page: one HTML file that opens without a network, and the files next to it."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from . import counts
from .drawing import Figure
from .figures import caption, figures
from .margins import split_sentence, split_table
from .results import (
    RunResults,
    attack_sentence,
    rounds_table,
    summary_sentences,
)
from .tables import accuracy_table, cost_table, file_name, parameter_lines, search_table, survival_table, table_files
from .templates import png_uri, rendered
from .worst_images import SMALL, Reason, WorstImage, class_text, perturbation_png, png

# Charts with a fixed place on the page.
PLACED = ("tradeoff", "margins", "sensitivity", "survival", "certified")
_REASONS: dict[Reason, tuple[str, str]] = {
    "lost": (
        "Broken, although both base classifiers are correct on the clean image",
        "Images on which rob alone remains robust come first: they are the price of mixing.",
    ),
    "narrow": ("Robust by the smallest margin", "The smallest margins that the adaptive attack left positive."),
}


def report_files(results: RunResults) -> dict[str, bytes]:
    """Return every file of `report/` by name.

    `index.html` is the page, `results.json` all numbers (`ResultsFile`), `table.csv` and `table.tex` the accuracy
    table, `<table>.csv` each other table, and `<figure>.pdf` each figure. `tradeoff.svg` is for model cards.
    """
    drawn = figures(results)
    files = {name: content.encode() for name, content in table_files(results).items()}
    files["results.json"] = (json.dumps(results.to_json(), indent=2, allow_nan=False) + "\n").encode()
    files |= {f"{name}.pdf": figure.pdf() for name, figure in drawn.items()}
    if "tradeoff" in drawn:
        files["tradeoff.svg"] = drawn["tradeoff"].svg("tradeoff").encode()
    return {"index.html": page(results, drawn, sorted(files)).encode(), **files}


def page(results: RunResults, drawn: dict[str, Figure], files: Sequence[str] = ()) -> str:
    """Return the page; it links the files next to it."""
    content: dict[str, Any] = {
        "results": results,
        "summary": summary_sentences(results),
        "attacks": attack_sentence(results),
        "seconds_total": sum(results.seconds.values()),
        "figures": {name: [Markup(svg) for svg in figure.svgs(name)] for name, figure in drawn.items()},
        "words_of": {name: figure.words or caption(name) for name, figure in drawn.items()},
        "captions": {name: caption(name) for name in drawn},
        "more": [name for name in drawn if name not in PLACED],
        "files": files,
        "pictures": picture_groups(results),
        "words": counts,
        "file_name": file_name,
        "accuracy": accuracy_table(results).only(["classifier", "clean", "robust"]),
        "survival": survival_table(results),
        "costs": cost_table(results),
    }
    if results.found:
        content |= {
            "parameters": parameter_lines(results),
            "betas": search_table(results.search),
            "rounds": rounds_table(results),
            "splits": split_table(results.splits),
            "split_sentence": split_sentence(results.splits),
        }
    return rendered("reports", "page.html", **content)


def picture_groups(results: RunResults) -> list[dict[str, Any]]:
    """Return the worst images by reason, each group with a title, a hint and its cards."""
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
    """Describe the certified radius and the attack outcome of an image; empty without certificates."""
    found = results.certified
    if found is None:
        return ""
    reach = found.reach[image.sample_id]
    words = found.radii.get(reach, f"{reach:.3f}")
    proven = f"certified up to {found.norm} {words}" if reach > 0 else f"not certified at any {found.norm} radius"
    left = "broken" if image.reason == "lost" else "robust"
    return f"Bracket: {proven}, and {left} under attack at {results.threat}."


def _card(image: WorstImage, class_names: Sequence[str], bracket: str = "") -> dict[str, Any]:
    clean_CHW, attacked_CHW = image.pixels
    perturbation, factor = perturbation_png(clean_CHW, attacked_CHW)
    name = f"Image {image.sample_id}, class {class_text(image.label, class_names)}"
    *before, after = image.predictions
    taken_for = class_text(after.predicted, class_names)
    return {
        "title": name,
        "kind": "pixels" if max(clean_CHW.shape[1:]) <= SMALL else "photo",
        "pictures": [
            ("clean", png_uri(png(clean_CHW)), f"{name}: the clean image"),
            (
                f"change × {factor:.3g}", png_uri(perturbation),
                f"{name}: the perturbation, {factor:.3g} times amplified around mid-gray",
            ),
            (
                "attacked", png_uri(png(attacked_CHW)),
                f"{name}: the attacked image, for which the mixed classifier predicts class {taken_for}",
            ),
        ],
        "sentence": image.sentence(class_names),
        "bracket": bracket,
        "predictions": [
            (f"{each.classifier}, {each.images}", each.words(class_names), each.predicted != image.label)
            for each in (*before, after)
        ],
    }  # fmt: skip

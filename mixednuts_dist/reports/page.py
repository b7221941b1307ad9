"""The report page: one HTML file that opens without a network, and the files next to it."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from .counts import seconds_text
from .drawing import Figure
from .figures import caption, figures
from .margins import split_sentence, split_table
from .results import RunResults, attack_sentence, parameter_lines, rounds_table, summary_sentences
from .tables import accuracy_table, cost_table, file_name, search_table, survival_table, table_files
from .templates import png_uri, rendered
from .worst_images import Reason, margin_text, perturbation_png, png

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

    `index.html` is the page, `results.json` all numbers, `table.csv` and `table.tex` the accuracy
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
        "figures": {name: [Markup(svg) for svg in figure.svgs(name)] for name, figure in drawn.items()},
        "captions": {name: caption(name) for name in drawn},
        "more": [name for name in drawn if name not in PLACED],
        "files": files,
        "pictures": [
            (title, hint, [image for image in results.worst if image.reason == reason])
            for reason, (title, hint) in _REASONS.items()
        ],
        "class_name": lambda label: dict(enumerate(results.class_names)).get(label, str(label)),
        "png_uri": png_uri,
        "png": png,
        "perturbation_png": perturbation_png,
        "margin_text": margin_text,
        "seconds_text": seconds_text,
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

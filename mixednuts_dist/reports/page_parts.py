"""What the page shows beside its charts, ready for the template: slider stops, costs and pictures as words."""

import base64
from collections.abc import Callable
from typing import Any

from ..selection.choice import Choice
from . import wording
from .cost import StageCost
from .json_form import predicted_counts
from .pictures import perturbation_png, png
from .results import RunResults
from .worst_images import Reason, Verdict, WorstImage

_REASONS: dict[Reason, tuple[str, str]] = {
    "lost": (
        "Lost, though both are right on the clean image",
        "Where rob alone survives its own attack, the price of mixing; these come first.",
    ),
    "narrow": ("Held by a hair", "The smallest margins that the adaptive attack left on the right side."),
}
_MEDIA_TYPES = {
    "csv": "text/csv",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "tex": "application/x-tex",
}


def slider_stops(results: RunResults) -> list[dict[str, Any]]:
    """The predicted curve in the slider's order, beta growing to the right.

    `words` is what the slider shows of each, by the element's id; `outcome` is clean and robust for a table.
    """
    entries = sorted(results.search.entries, key=lambda entry: entry.beta)
    return [
        {
            "beta": entry.beta,
            "words": _stop_words(entry, results),
            "outcome": [f"{wording.percent_text(count)} ({count.correct})" for count in predicted_counts(entry)],
        }
        for entry in entries
    ]


def _stop_words(entry: Choice, results: RunResults) -> dict[str, str]:
    clean, robust_bound = predicted_counts(entry)
    return {
        "beta": f"{entry.beta:g}",
        "s": f"{entry.scale:.5g}",
        "p": f"{entry.power:.5g}",
        "c": f"{entry.bias:.5g}".replace("-", "−"),
        "alpha": wording.weight_text(entry.alpha, entry.one_minus_alpha),
        "one_minus_alpha": f"{entry.one_minus_alpha:.4g}",
        "clamp": entry.clamp,
        "clean": wording.percent_first(clean),
        "robust_bound": wording.percent_first(robust_bound),
        "clean_interval": wording.bootstrap_text(entry.clean_interval),
        "robust_interval": wording.bootstrap_text(entry.kept_interval),
        "measured": _measured_words(entry, results),
    }


def _measured_words(entry: Choice, results: RunResults) -> str:
    """The first finished run that deployed exactly these parameters."""
    for point in results.measured:
        if (point.parameters.scale, point.parameters.power, point.parameters.bias, point.parameters.alpha) == (
            entry.scale, entry.power, entry.bias, entry.alpha,
        ):  # fmt: skip
            return f"clean {wording.percent_first(point.clean)}, robust {wording.percent_first(point.robust)}"
    return "not attacked yet"


def cost_rows(results: RunResults) -> list[tuple[str, list[str]]]:
    """The bill, one row a quantity and one cell a stage with receipts; kinds of devices that none used are left out."""
    quantities: list[tuple[str, Callable[[StageCost], str]]] = [
        ("images", lambda cost: f"{cost.n_images:,}"),
        ("partitions", lambda cost: f"{cost.n_partitions:,}"),
        ("nodes", lambda cost: str(len(cost.nodes))),
        ("computed on", lambda cost: ", ".join(cost.devices)),
        ("GPU-hours", lambda cost: _hours(cost.gpu_seconds)),
        ("core-hours", lambda cost: _hours(cost.core_seconds)),
        ("wall-clock time", _wall_clock),
        ("images/s, all workers", lambda cost: _rate(cost.images_per_second)),
        ("images passed forward", lambda cost: f"{cost.n_forward:,}"),
        ("images passed backward", lambda cost: f"{cost.n_backward:,}"),
        ("passes an image", lambda cost: f"{cost.passes_per_image:,.0f}"),
    ]
    rows = [(name, [words(cost) for cost in results.costs]) for name, words in quantities]
    return [(name, cells) for name, cells in rows if any(cell != "–" for cell in cells)]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g}" if seconds else "–"


def _wall_clock(cost: StageCost) -> str:
    return "taken over" if cost.wall_seconds is None else wording.seconds_text(cost.wall_seconds)


def _rate(images_per_second: float | None) -> str:
    return "–" if images_per_second is None else f"{images_per_second:.3g}"


def picture_groups(results: RunResults) -> list[dict[str, Any]]:
    """The worst images by reason: a title, what to see, and the cards."""
    return [
        {
            "title": title,
            "hint": hint,
            "cards": [_card(image) for image in results.worst if image.reason == reason],
        }
        for reason, (title, hint) in _REASONS.items()
    ]


def _card(image: WorstImage) -> dict[str, Any]:
    perturbation, factor = perturbation_png(image.clean_CHW, image.attacked_CHW)
    after = image.verdicts[-1]
    name = f"Image {image.sample_id}, class {image.label}"
    kind = "pixels" if max(image.clean_CHW.shape[1:]) <= 96 else "photo"
    return {
        "title": name,
        "kind": kind,
        "pictures": [
            ("clean", data_uri("a.png", png(image.clean_CHW)), f"{name}: the clean image"),
            (
                f"change × {factor:.3g}",
                data_uri("a.png", perturbation),
                f"{name}: the perturbation, {factor:.3g} times amplified around mid-grey",
            ),
            (
                "attacked",
                data_uri("a.png", png(image.attacked_CHW)),
                f"{name}: the attacked image, which the mixture takes for class {after.predicted}",
            ),
        ],
        "verdicts": _verdict_rows(image),
    }


def _verdict_rows(image: WorstImage) -> list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]:
    """Each classifier with its verdict before and after; what std says of the attacked image is not stored."""
    before = {found.classifier: _cell(found, image.label) for found in image.verdicts if found.images == "clean"}
    after = {found.classifier: _cell(found, image.label) for found in image.verdicts if found.images != "clean"}
    return [(classifier, verdict, after.get(classifier)) for classifier, verdict in before.items()]


def _cell(verdict: Verdict, label: int) -> dict[str, Any]:
    return {
        "predicted": verdict.predicted,
        "margin": f"{verdict.margin:+.3f}".replace("-", "−"),
        "wrong": verdict.predicted != label,
    }


def data_uri(name: str, content: bytes) -> str:
    """The content as an address that fetches nothing; its kind by the name's ending."""
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"

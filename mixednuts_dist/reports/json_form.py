"""Results as a plain dict that strict JSON can hold; `RunResults.to_json` documents the fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..selection.choice import Choice
from .confidence import MarginGroup
from .intervals import Count
from .wording import summary_sentence

if TYPE_CHECKING:
    from .results import AccuracyRow, RunResults

FORMAT = "mixednuts-results/1"


def results_json(results: RunResults) -> dict[str, Any]:
    """Every field of `RunResults.to_json`, in its order."""
    content = {
        "format": FORMAT,
        "run": _identity(results),
        "n_images": results.n_images,
        "summary": summary_sentence(results),
        "accuracy": {row.classifier: _accuracy_entry(row) for row in results.accuracy},
        "parameters": _parameters(results),
        "tradeoff": _tradeoff(results),
        "survival": [{"step": step.step, "lost": step.lost, **step.standing.to_json()} for step in results.survival],
        "margins": {"medians": [_median_entry(group) for group in results.margins], "gaps": results.gaps()},
        "worst_images": [image.to_json() for image in results.worst],
        "costs": [cost.to_json() for cost in results.costs],
        "seconds": dict(results.seconds),
        "seconds_total": sum(results.seconds.values()),
        "notes": list(results.notes),
    }
    return {key: _finite(value) for key, value in content.items()}


def _identity(results: RunResults) -> dict[str, Any]:
    return {
        "id": results.run_id,
        "name": results.name,
        "dataset": results.dataset,
        "std": results.std,
        "rob": results.rob,
        "threat": {"norm": results.threat.norm, "eps": results.threat.eps},
    }


def _accuracy_entry(row: AccuracyRow) -> dict[str, Any]:
    return {"clean": row.clean.to_json(), "robust": row.robust.to_json(), "attack": row.attack}


def _parameters(results: RunResults) -> dict[str, Any]:
    chosen, search = results.parameters, results.search
    return {
        **transform_entry(chosen),
        "cutoff": chosen.cutoff,
        "objective": chosen.objective,
        "criterion": search.criterion,
        "clamp": search.clamp,
        "ln_k": search.ln_k,
        "surrogate_alpha": search.surrogate_alpha,
        "on_grid_edge": list(chosen.on_grid_edge),
        "n_candidates": search.n_candidates,
        "n_undeployable": search.n_undeployable,
    }


def _tradeoff(results: RunResults) -> dict[str, Any]:
    mixed = results.row("mixed")
    return {
        "predicted": [
            {
                **transform_entry(entry),
                "clean": clean.to_json(),
                "robust_bound": bound.to_json(),
                "clean_bootstrap": [100 * edge for edge in entry.clean_interval],
                "robust_bootstrap": [100 * edge for edge in entry.kept_interval],
            }
            for entry in results.search.entries
            for clean, bound in [predicted_counts(entry)]
        ],
        "measured": {
            "beta": results.parameters.beta,
            "clean": mixed.clean.to_json(),
            "robust": mixed.robust.to_json(),
        },
        "measured_runs": [point.to_json() for point in results.measured],
    }


def transform_entry(chosen: Choice) -> dict[str, float]:
    """beta, s, p, c, alpha and 1 - alpha under the names that every file of the report uses."""
    return {
        "beta": chosen.beta,
        "s": chosen.scale,
        "p": chosen.power,
        "c": chosen.bias,
        "alpha": chosen.alpha,
        "one_minus_alpha": chosen.one_minus_alpha,
    }


def predicted_counts(entry: Choice) -> tuple[Count, Count]:
    """Clean images right, and the guaranteed bound of the attacked ones."""
    return Count(entry.clean_correct, entry.total), Count(entry.kept_predicted, entry.total)


def _median_entry(group: MarginGroup) -> dict[str, Any]:
    return {
        "classifier": group.classifier,
        "images": group.images,
        "correct": group.correct,
        "n": len(group.margins),
        "median": group.median,
    }


def _finite(value: Any) -> Any:
    """The same tree with None for every float that strict JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

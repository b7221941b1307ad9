"""Compare finished runs on the same images, image by image.

Shapes: N images of the runs.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from ..errors import InvalidInputError
from ..stages.runs import Run
from ..stages.stage import stage_of
from .counts import minus, paired_interval
from .table import Cell, Table


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare all pairs of two or more finished runs, first on clean and then on attacked images.

    Returns:
        For each pair: the question `what`, the run ids `first` and `second`, the images that are right in `both`, in
        one (`only_first`, `only_second`) or in `neither`, the difference of the accuracies in points with its 95%
        `interval`, the `p` of McNemar's exact test, and `p_holm`, corrected over all pairs of this question.

    Raises:
        InvalidInputError: for fewer than two runs, or if images or threat models differ.
        MissingArtifact: if an evaluation has not finished.
        ConfigError: for a run that another release wrote.
    """
    if len(runs) < 2:
        raise InvalidInputError("a comparison takes two runs or more; give their folders or URIs")
    for run in runs[1:]:
        _require_comparable(runs[0], run)
    correct, pairs = [(run.config.run_id(), _correct(run)) for run in runs], list[dict[str, Any]]()
    for what in ("clean", "robust"):
        found = [
            {"what": what, "first": first, "second": second, **_counts(first_by[what], second_by[what])}
            for (first, first_by), (second, second_by) in combinations(correct, 2)
        ]
        corrected = holm([pair["p"] for pair in found])
        pairs += [{**pair, "p_holm": p_holm} for pair, p_holm in zip(found, corrected, strict=True)]
    return pairs


def _counts(first_N: Tensor, second_N: Tensor) -> dict[str, Any]:
    only_first, only_second = int((first_N & ~second_N).sum()), int((second_N & ~first_N).sum())
    return {
        "both": int((first_N & second_N).sum()),
        "only_first": only_first,
        "only_second": only_second,
        "neither": int((~first_N & ~second_N).sum()),
        "interval": paired_interval(only_first, only_second, first_N.numel()),
        "difference_points": 100 * (only_first - only_second) / first_N.numel(),
        "p": exact_mcnemar(only_first, only_second),
    }


def comparison_table(runs: Sequence[Run], pairs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each pair and question; the runs are A, B and so on."""
    letters = {run.config.run_id(): letter for letter, run in _lettered(runs).items()}
    rows: list[list[Cell]] = []
    for pair in pairs:
        low, high = pair["interval"]
        points = minus(f"{pair['difference_points']:+.2f}"), minus(f"[{low:+.1f}, {high:+.1f}]")
        counts = [pair[name] for name in ("both", "only_first", "only_second", "neither")]
        name = f"{pair['what']}, {letters[pair['first']]} {letters[pair['second']]}"
        rows.append([name, *counts, *points, pair["p_holm"]])
    return Table(["right", "both", "first", "second", "neither", "points", "95%", "p (Holm)"], rows)


def comparison_notes(runs: Sequence[Run]) -> list[str]:
    """Name the runs and the test, and warn if the runs were attacked differently."""
    found = [f"{letter}: {run.config.run_id()} in {run.store.uri}" for letter, run in _lettered(runs).items()]
    found.append("p: McNemar's exact test with Holm's correction over all pairs of runs.")
    if any(run.config.evaluate != runs[0].config.evaluate for run in runs):
        found.append("The runs were attacked differently (key evaluate). Each is robust under its own attack.")
    return found


def _lettered(runs: Sequence[Run]) -> dict[str, Run]:
    return {chr(ord("A") + i): run for i, run in enumerate(runs)}


def _correct(run: Run) -> dict[str, Tensor]:
    """Return the images on which the attacked classifier of a run is correct, clean and under its adaptive attack."""
    return stage_of(run.config, "evaluate").rows(run, ["clean", "robust"])


def exact_mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test (1947).

    It is the probability that `n` fair coins split at least as unevenly as the `n` images that differ.

    >>> exact_mcnemar(0, 0), round(exact_mcnemar(6, 0), 6)
    (1.0, 0.03125)
    """
    from scipy.stats import binomtest  # takes most of a second to import

    n = only_first + only_second
    return float(binomtest(only_first, n).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction (1979): each p times the number of p-values that are not below it.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order, found, largest = sorted(range(len(p_values)), key=p_values.__getitem__), [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        found[i] = largest
    return found


def _require_comparable(first: Run, second: Run) -> None:
    ids = first.config.run_id(), second.config.run_id()
    for what in ("data", "labels"):
        if first.inputs.checksums[what] != second.inputs.checksums[what]:
            raise InvalidInputError(
                f"runs {ids[0]} ({first.inputs.n_images} images of {first.config.data.uri}) and {ids[1]} "
                f"({second.inputs.n_images} of {second.config.data.uri}) are not about the same images: their {what} "
                "differ. Compare runs with the same data.uri and data.n"
            )
    if first.config.threat != second.config.threat:
        threats = [str(run.config.threat.threat_model()) for run in (first, second)]
        raise InvalidInputError(
            f"runs {ids[0]} ({threats[0]}) and {ids[1]} ({threats[1]}) have different threat models; their robust "
            "accuracies cannot be compared"
        )

"""What the figures and tables show, as CSV for scripts and as LaTeX for papers, under the names that the page gives."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..selection.choice import Choice
from .confidence import GROUPS, medians_table
from .intervals import Count
from .json_form import predicted_counts
from .margin_chart import N_BINS
from .results import RunResults
from .sensitivity_chart import sensitivity_rows
from .tables import csv_table, latex_table
from .wording import interval_text, latex_text, percent_text

Cell = str | int | float | Count | None


@dataclass(frozen=True)
class DataTable:
    """Columns by name and rows of cells; a count becomes its numbers in CSV, percent and interval in LaTeX."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def as_csv(self) -> str:
        """Unrounded; a count takes the columns NAME_correct, _total, _percent, _low and _high."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        counted = [any(isinstance(row[i], Count) for row in self.rows) for i in range(len(self.columns))]
        heads = [_heads(name, is_count) for name, is_count in zip(self.columns, counted, strict=True)]
        writer.writerow([head for group in heads for head in group])
        for row in self.rows:
            cells = zip(row, heads, strict=True)
            writer.writerow([value for cell, group in cells for value in _csv_cells(cell, group)])
        return file.getvalue()

    def as_latex(self, comment: str) -> str:
        """A `tabular` for `\\input`, four significant digits; needs the booktabs package."""
        body = [[_latex_cell(cell) for cell in row] for row in self.rows]
        lines = [[latex_text(name.replace("_", " ")) for name in self.columns], *body]
        head, *rest = [f"  {' & '.join(cells)} " + r"\\" for cells in lines]
        alignment = "l" + "r" * (len(self.columns) - 1)
        return "\n".join(
            [f"% {' '.join(comment.split())}", rf"\begin{{tabular}}{{{alignment}}}", r"  \toprule", head,
             r"  \midrule", *rest, r"  \bottomrule", r"\end{tabular}", ""]
        )  # fmt: skip


def exported_files(results: RunResults) -> dict[str, str]:
    """File name -> content: `table.*` is the accuracy table, every other is named after what it shows."""
    files = {"table.csv": csv_table(results), "table.tex": latex_table(results)}
    for name, make in TABLES.items():
        table = make(results)
        if table.rows:
            files[f"{name}.csv"] = table.as_csv()
            if name not in DATA_ONLY:
                files[f"{name}.tex"] = table.as_latex(f"{results.name}, {name}; run {results.run_id}")
    return files


def _tradeoff(results: RunResults) -> DataTable:
    rows = [
        [*_parameter_cells(entry), *predicted_counts(entry), *entry.clean_interval, *entry.kept_interval]
        for entry in results.search.entries
    ]
    edges = [f"{name}_bootstrap_{edge}" for name in ("clean", "robust") for edge in ("low", "high")]
    return DataTable([*_PARAMETERS, "clean", "robust_bound", *edges], rows)


def _measured(results: RunResults) -> DataTable:
    rows = [
        [point.run_id, point.criterion, point.clamp, *_parameter_cells(point.parameters), point.clean, point.robust]
        for point in results.measured
    ]
    return DataTable(["run", "criterion", "clamp", *_PARAMETERS, "clean", "robust"], rows)


def _medians(results: RunResults) -> DataTable:
    rows = [
        [classifier, *(group.median if group else None for group in groups), gap]
        for classifier, groups, gap in medians_table(results.margins)
    ]
    return DataTable(["classifier", *(f"{images}_{_right(right)}" for images, right in GROUPS), "margin_gap"], rows)


def _histograms(results: RunResults) -> DataTable:
    rows: list[list[Cell]] = []
    for group in results.margins:
        counts, edges = np.histogram(group.margins, bins=N_BINS, range=(0.0, 1.0))
        named = [group.classifier, group.images, _right(group.correct)]
        rows += [
            [*named, float(left), float(right), int(count)]
            for left, right, count in zip(edges, edges[1:], counts, strict=False)
        ]
    return DataTable(["classifier", "images", "prediction", "margin_from", "margin_to", "n"], rows)


def _sensitivity(results: RunResults) -> DataTable:
    columns = ["s", "p", "c", "objective", "selected"]
    rows = [[row[name] for name in columns] for row in sensitivity_rows(results)]
    return DataTable([*columns[:3], "objective_percent", "selected"], rows)


def _survival(results: RunResults) -> DataTable:
    return DataTable(
        ["after", "standing", "lost"], [[step.step, step.standing, step.lost] for step in results.survival]
    )


def _costs(results: RunResults) -> DataTable:
    entries = [cost.to_json() for cost in results.costs]
    columns = list(entries[0]) if entries else []
    rows = [[", ".join(value) if isinstance(value, list) else value for value in entry.values()] for entry in entries]
    return DataTable(columns, rows)


def _worst_images(results: RunResults) -> DataTable:
    rows: list[list[Cell]] = [
        [image.sample_id, image.label, image.reason, *vars(verdict).values()]
        for image in results.worst
        for verdict in image.verdicts
    ]
    return DataTable(["sample_id", "label", "reason", "classifier", "images", "predicted", "margin"], rows)


TABLES: Mapping[str, Callable[[RunResults], DataTable]] = {
    "tradeoff": _tradeoff,
    "measured": _measured,
    "margins": _histograms,
    "medians": _medians,
    "sensitivity": _sensitivity,
    "survival": _survival,
    "costs": _costs,
    "worst_images": _worst_images,
}
DATA_ONLY = ("margins", "sensitivity")  # hundreds of rows behind a figure: nobody prints those
_PARAMETERS = ("beta", "s", "p", "c", "alpha", "one_minus_alpha")


def _parameter_cells(chosen: Choice) -> list[Cell]:
    return [chosen.beta, chosen.scale, chosen.power, chosen.bias, chosen.alpha, chosen.one_minus_alpha]


def _right(correct: bool) -> str:
    return "correct" if correct else "incorrect"


def _heads(name: str, is_count: bool) -> list[str]:
    return [f"{name}_{part}" for part in ("correct", "total", "percent", "low", "high")] if is_count else [name]


def _csv_cells(cell: Cell, heads: Sequence[str]) -> list[Any]:
    if isinstance(cell, Count):
        return list(cell.to_json().values())
    return ["" if cell is None else cell] * len(heads)


def _latex_cell(cell: Cell) -> str:
    if isinstance(cell, Count):
        return f"{percent_text(cell)} {interval_text(cell)}"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "--" if cell is None else latex_text(str(cell))

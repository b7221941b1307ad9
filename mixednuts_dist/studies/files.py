"""A study's files: the table as CSV, LaTeX and Markdown, all of it as JSON, the figure as SVG and PNG."""

import json
from collections.abc import Sequence
from typing import Any

import vl_convert

from ..config import RunConfig
from ..reports.figures import PNG_SCALE, figure_spec, static_svg
from ..reports.intervals import Count
from .beside import as_table, beside, comparison_sentence, same_set_up
from .outcome import Cell, Outcome, StudyTable, cell_text
from .study import Study

FORMAT = "mixednuts-study/1"


def study_files(study: Study, outcome: Outcome, config: RunConfig) -> dict[str, bytes]:
    """Every file of one study by name."""
    same = same_set_up(study.paper, config)
    table = outcome.table if same is None else beside(outcome.table, same)
    svg = static_svg(figure_spec(outcome.figure))
    return {
        "table.csv": table.as_csv().encode(),
        "table.tex": table.as_latex(f"{study.title}; {study.section}; run {config.run_id()}").encode(),
        "table.md": markdown(study, outcome, config).encode(),
        "study.json": json.dumps(as_json(study, outcome, config), indent=1, allow_nan=False).encode(),
        "figure.svg": svg,
        "figure.png": vl_convert.svg_to_png(svg.decode(), scale=PNG_SCALE),
    }


def as_json(study: Study, outcome: Outcome, config: RunConfig) -> dict[str, Any]:
    """The study as plain values; a count as in `results.json`."""
    same = same_set_up(study.paper, config)
    table = outcome.table if same is None else beside(outcome.table, same)
    return {
        "format": FORMAT,
        "study": study.name,
        "section": study.section,
        "title": study.title,
        "run_id": config.run_id(),
        "columns": list(table.columns),
        "rows": [[_plain(cell) for cell in row] for row in table.rows],
        "findings": list(outcome.findings),
        "remarks": list(outcome.remarks),
        "same_set_up_as_the_paper": same is not None,
        "paper": [
            {"label": printed.label, "set_up": printed.set_up.words, "columns": list(printed.columns),
             "rows": [list(row) for row in printed.rows], "note": printed.note}
            for printed in study.paper
        ],
    }  # fmt: skip


def markdown(study: Study, outcome: Outcome, config: RunConfig) -> str:
    """The whole study to read: table, findings, remarks, the paper's numbers."""
    same = same_set_up(study.paper, config)
    table = outcome.table if same is None else beside(outcome.table, same)
    parts = [f"# {study.title}", f"{study.name}: {study.section}. Run {config.run_id()}.", *_markdown_table(table), ""]
    parts += [f"- {sentence}" for sentence in (*outcome.findings, *outcome.remarks)]
    parts += ["", comparison_sentence(study.paper, config)]
    for printed in () if same else study.paper:
        note = f" {printed.note}" if printed.note else ""
        parts += [
            "",
            f"The paper's {printed.label}, {printed.set_up.words}.{note}",
            "",
            *_markdown_table(as_table(printed)),
        ]
    return "\n".join([*parts, ""])


def _markdown_table(table: StudyTable) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return ["", line(table.columns), line(["---"] * len(table.columns)),
            *(line([cell_text(cell) for cell in row]) for row in table.rows)]  # fmt: skip


def _plain(cell: Cell) -> Any:
    return cell.to_json() if isinstance(cell, Count) else cell

"""What a study comes to: a table, a figure and plain sentences."""

from dataclasses import dataclass

import altair as alt

from ..reports.exports import Cell, DataTable
from ..reports.intervals import Count
from ..reports.wording import interval_text, percent_text

__all__ = ["Cell", "Outcome", "StudyTable", "cell_text"]


@dataclass(frozen=True)
class StudyTable(DataTable):
    """A table whose first column names the row."""

    def row(self, name: str) -> dict[str, Cell]:
        """One row by its first cell, as column -> cell."""
        return next(dict(zip(self.columns, row, strict=True)) for row in self.rows if row[0] == name)


@dataclass(frozen=True)
class Outcome:
    """One finished study."""

    table: StudyTable
    figure: alt.TopLevelMixin
    findings: tuple[str, ...]  # plain sentences with counts and intervals
    remarks: tuple[str, ...] = ()  # what was reduced or differs from the paper's procedure


def cell_text(cell: Cell) -> str:
    """A cell for people: counts with percentage and 95 % interval, numbers with four digits, nothing as a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, Count):
        return f"{cell.correct}/{cell.total} {percent_text(cell)} % {interval_text(cell)}"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)

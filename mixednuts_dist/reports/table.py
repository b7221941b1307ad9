"""Tables that are written to the terminal, CSV, LaTeX, Markdown and HTML with the same columns, rows and numbers.

A column has a name for scripts (`one_minus_alpha`). `HEADINGS` has headings that differ from the name.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from .counts import COUNTED, Count, Seconds, interval_text, minus, percent_text, seconds_text
from .results_file import plain
from .templates import rendered

Cell = str | int | float | Count | None

HEADINGS = {
    "one_minus_alpha": "1 − alpha",
    "sample_id": "image",
    "seconds": "time",
    "gpu_hours": "GPU-hours",
    "core_hours": "core-hours",
    "robust_predicted": "robust, predicted",
    "kept_predicted": "predicted retention",
    "kept_measured": "achieved retention",
}
_NAME_WIDTH = 24  # a longer name may be cut in a terminal
_LATEX = {
    **{name: f"${name}$" for name in "spc"}, "beta": r"$\beta$", "alpha": r"$\alpha$", "one_minus_alpha": r"$1-\alpha$",
}  # fmt: skip
_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "β": r"$\beta$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Columns by name and rows of cells; the first column names the row.

    A count is written as percent, 95% interval and number of images; in CSV it takes five columns, unrounded.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    bold: str | None = None  # first cell of the row that stands out
    printed: Sequence[str] | None = None  # the columns in LaTeX and on a phone

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Cell]], *, bold: str | None = None) -> "Table":
        """Return the table of these rows, whose keys are the columns."""
        rows = list(rows)
        columns = list(rows[0])
        return cls(columns, [tuple(row[name] for name in columns) for row in rows], bold)

    def row(self, name: str) -> dict[str, Cell]:
        """Return one row by its first cell, as column -> cell."""
        return next(row for row in self.dicts() if row[self.columns[0]] == name)

    def dicts(self) -> list[dict[str, Cell]]:
        """Return the rows as column -> cell."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def only(self, columns: Sequence[str]) -> "Table":
        """Return the table with these columns alone."""
        places = [list(self.columns).index(name) for name in columns]
        return Table(columns, [[row[i] for i in places] for row in self.rows], self.bold, self.printed)

    def terminal(self, width: int, title: str = "") -> rich_table.Table:
        """Return the table for a console of this width; intervals are left out if the table is too wide."""
        measure, whole = Console(width=10_000).measure, self._rich(title, intervals=True)
        shown = whole if measure(whole).minimum <= width else self._rich(title, intervals=False)
        if measure(shown).maximum > width:
            for column in shown.columns:  # otherwise Rich shrinks counts too, and then cuts off what is too wide
                column.width = column.min_width
        return shown

    def _rich(self, title: str, *, intervals: bool) -> rich_table.Table:
        shown = rich_table.Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, title=title or None,
            title_justify="left", title_style="bold",
        )  # fmt: skip
        for index, name in enumerate(self.columns):
            if index:
                uncut = [
                    cell_text(row[index], intervals=intervals) for row in self.rows if isinstance(row[index], Count)
                ]
            else:
                uncut = [cell_text(row[0])[:_NAME_WIDTH] for row in self.rows]
            widest = max(map(len, uncut), default=None)  # a heading may wrap, a count or a short name may not
            shown.add_column(Text(heading(name)), justify="right" if index else "left", min_width=widest)
        for row in self.rows:
            texts = [Text(cell_text(cell, intervals=intervals)) for cell in row]
            shown.add_row(*texts, style="bold" if row[0] == self.bold else "")
        return shown

    def as_csv(self) -> str:
        """Write unrounded numbers; a count takes the columns NAME_correct, _total, _percent, _low and _high."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        heads = [
            [f"{name}_{part}" for part in COUNTED] if is_count else [name] for name, is_count in self._counted().items()
        ]
        writer.writerow([head for group in heads for head in group])
        for row in self.rows:
            cells = zip(row, heads, strict=True)
            writer.writerow([value for cell, group in cells for value in _csv_cells(cell, len(group))])
        return file.getvalue()

    def as_latex(self, comment: str) -> str:
        """Return a `tabular` for `\\input` with the printed columns; it needs the booktabs package."""
        table = self.only(self.printed or self.columns)
        heads = [_latex_heading(name) + r" (\%)" * is_count for name, is_count in table._counted().items()]
        body = [[_latex_cell(cell) for cell in row] for row in table.rows]
        head, *rest = [f"  {' & '.join(cells)} " + r"\\" for cells in (heads, *body)]
        alignment = "l" + "r" * (len(table.columns) - 1)
        return "\n".join(
            [f"% {' '.join(comment.split())}", rf"\begin{{tabular}}{{{alignment}}}", r"  \toprule", head,
             r"  \midrule", *rest, r"  \bottomrule", r"\end{tabular}", ""]
        )  # fmt: skip

    def as_markdown(self) -> str:
        """Write a pipe table."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        head = [line([heading(name) for name in self.columns]), line(["---"] * len(self.columns))]
        return "\n".join([*head, *(line([cell_text(cell) for cell in row]) for row in self.rows)])

    def as_html(self, caption: str = "", css: str = "stack") -> Markup:
        """Return a `<table>` for the page; every text is escaped."""
        return rendered("reports", "table.html", table=self, caption=caption, css=css, kinds=self._kinds(), **_CELLS)

    def to_json(self) -> dict[str, Any]:
        """Return the columns and the rows as JSON holds them."""
        return {"columns": plain(self.columns), "rows": plain(self.rows)}

    def _counted(self) -> dict[str, bool]:
        """Return whether each column has counts."""
        return {name: any(isinstance(row[i], Count) for row in self.rows) for i, name in enumerate(self.columns)}

    def _kinds(self) -> list[str]:
        """Return the CSS classes of each column: a phone hides `more`, and `words` are aligned to the left."""
        shown = self.printed or self.columns
        return [
            " ".join(["more"] * (name not in shown) + ["words"] * all(isinstance(row[i], str) for row in self.rows))
            for i, name in enumerate(self.columns)
        ]


def cell_text(cell: Cell, *, intervals: bool = True) -> str:
    """Write a cell for people: a count as in `566/609 92.9 [90.6, 94.7]`, a number with four digits, a dash.

    Counts of equally many images have equal widths.
    """
    if isinstance(cell, Count) and cell.total:
        counted = f"{cell.correct:>{len(str(cell.total))}}/{cell.total} {percent_text(cell):>5}"
        return f"{counted} {interval_text(cell):>12}" if intervals else counted
    if cell is None or isinstance(cell, Count):
        return "–"
    if isinstance(cell, Seconds):
        return seconds_text(cell)
    if isinstance(cell, float):
        return minus(f"{cell:.4g}")
    return f"{cell:,}" if isinstance(cell, int) else cell


def latex_text(text: str) -> str:
    """Escape the special characters of LaTeX."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def print_table(table: Table, console: Console, title: str = "") -> None:
    """Print a table on a console, with numbers in the default color."""
    console.print(table.terminal(console.width, title), highlight=False)


def heading(name: str) -> str:
    """Return the heading of a column for people."""
    return HEADINGS.get(name, name.replace("_", " "))


def _latex_heading(name: str) -> str:
    words = heading(name)
    return _LATEX.get(name) or latex_text(words[:1].upper() + words[1:])


def _csv_cells(cell: Cell, width: int) -> list[Any]:
    if isinstance(cell, Count):
        return [getattr(cell, part) for part in COUNTED]
    return ["" if cell is None else cell] * width


def _latex_cell(cell: Cell) -> str:
    if isinstance(cell, Count):
        return rf"{percent_text(cell)} {{\footnotesize {interval_text(cell)}}}" if cell.total else "--"
    return "--" if cell is None else latex_text(cell_text(cell))


_CELLS = {"heading": heading, "text": cell_text, "percent": percent_text, "interval": interval_text}

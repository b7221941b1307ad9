"""The tables as text, as CSV and as LaTeX."""

import csv
import io

import pytest
from rich.console import Console

from mixednuts_dist.reports.counts import Count, interval_text, percent_text
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.reports.table import Table, latex_text, print_table
from mixednuts_dist.reports.tables import TABLES, print_results, table_files
from tests.helpers.made_up_run import made_up_results


def printed(results: RunResults, width: int = 80) -> str:
    file = io.StringIO()
    print_results(results, Console(file=file, width=width))
    return file.getvalue()


def test_names_are_not_read_as_markup() -> None:
    assert "[bold]x[/nonsense]" in printed(made_up_results(40, name="[bold]x[/nonsense]"))


def rows_of(content: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(content)))
    assert not any(None in row or None in row.values() for row in rows), "each cell has a heading"
    return rows


TABLE = Table(["after", "standing", "lost"], [["apgd-ce", Count(30, 40), 7], ["fab-t", None, 0.123456]])


def test_counts_become_columns_in_csv_and_an_interval_in_latex() -> None:
    (first, second) = rows_of(TABLE.as_csv())
    assert (first["standing_correct"], first["standing_total"], first["standing_percent"]) == ("30", "40", "75.0")
    assert second["standing_low"] == ""
    assert second["lost"] == "0.123456"
    lines = TABLE.as_latex("a\ncomment").splitlines()
    assert lines[0] == "% a comment"
    assert r"  apgd-ce & 75.0 {\footnotesize [59.8, 85.8]} & 7 \\" in lines
    assert r"  fab-t & -- & 0.1235 \\" in lines
    assert r"  After & Standing (\%) & Lost \\" in lines


def test_every_form_has_every_cell() -> None:
    terminal = io.StringIO()
    Console(file=terminal, width=80).print(TABLE.terminal(80))
    shown = {"markdown": TABLE.as_markdown(), "html": str(TABLE.as_html()), "terminal": terminal.getvalue()}
    for form, text in shown.items():
        for words in ("apgd-ce", "75.0", "[59.8, 85.8]", "30/40", "7", "fab-t", "–", "0.1235"):
            assert words in text, form


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_cuts_no_count(width: int, results: RunResults) -> None:
    lines = printed(results, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    for row in results.accuracy:
        line = next(line for line in lines if line.startswith(row.classifier) and "/300" in line)
        for count in (row.clean, row.robust):
            assert f"{count.correct}/300" in line and percent_text(count) in line
            assert (interval_text(count) in line) == (width == 80)


@pytest.mark.parametrize("width", range(74, 83))
def test_headings_wrap_before_a_name_or_a_cell_is_cut(width: int) -> None:
    columns = ["stage", "partitions", "of", "clean", "robust", "worker time"]
    done = ["attack", "6/6", "rob", Count(407, 450), Count(300, 450), "5.6 s"]
    terminal = io.StringIO()
    table = Table(columns, [done, ["search/round-2", "0/6", "mixed", None, None, None]])
    print_table(table, Console(file=terminal, width=width))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-2].split() == ["attack", "6/6", "rob", "407/450", "90.4", "300/450", "66.7", "5.6", "s"]
    assert lines[-1].split() == ["search/round-2", "0/6", "mixed", "–", "–", "–"]


def test_a_name_cannot_leave_its_cell() -> None:
    table = Table(["run_id"], [["50%_a&b{c}\\d"], ["<img src=x>|"]])
    assert latex_text("50%_a&b{c}\\d") == r"50\%\_a\&b\{c\}\textbackslash{}d"
    assert "Run id" in table.as_latex("x")
    assert "&lt;img src=x&gt;|" in table.as_html()
    assert r"<img src=x>\|" in table.as_markdown()


def test_every_table_has_its_rows(results: RunResults) -> None:
    files = table_files(results)
    assert set(files) == {*(f"{name}.csv" for name in TABLES), "table.tex"}
    assert len(rows_of(files["tradeoff.csv"])) == len(results.search.entries)
    assert [row["after"] for row in rows_of(files["survival.csv"])] == [step.step for step in results.survival]
    lines = files["table.tex"].splitlines()
    assert [line.split("&")[0].strip() for line in lines if line.endswith(r"\\")][1:] == ["std", "rob", "mixed"]
    assert sum(line.startswith("%") for line in lines) == 1

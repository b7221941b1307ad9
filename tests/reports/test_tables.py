"""The tables as text, as CSV and as LaTeX."""

import csv
import io

import pytest
from rich.console import Console

from mixednuts_dist.reports.counts import interval_text, percent_text, seconds_text, threat_text, weight_text
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.reports.tables import csv_table, latex_table, print_results
from mixednuts_dist.threat import ThreatModel

from .made_up_run import made_up_results


def printed(results: RunResults, width: int = 80) -> str:
    file = io.StringIO()
    print_results(results, Console(file=file, width=width))
    return file.getvalue()


def test_log_file_has_no_escape_codes_and_80_columns(results: RunResults) -> None:
    text = printed(results)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_accuracy_row_is_whole_on_one_line(results: RunResults) -> None:
    row = results.row("mixed")
    line = next(line for line in printed(results).splitlines() if line.startswith("mixed") and "after" not in line)
    for count in (row.clean, row.robust):
        assert f"{count.correct}/{count.total}" in line
        assert percent_text(count) in line
        assert interval_text(count) in line


def test_large_counts_fit_too() -> None:
    lines = printed(made_up_results(5000)).splitlines()
    assert any(line.startswith("std") and line.rstrip().endswith("]") and line.count("/5000") == 2 for line in lines)


def test_names_are_not_read_as_markup() -> None:
    assert "[bold]x[/nonsense]" in printed(made_up_results(40, name="[bold]x[/nonsense]"))


def test_everything_is_said(results: RunResults) -> None:
    text = " ".join(printed(results).split())
    for words in ("beta = 0.95", "s = 5, p = 4, c = -1.1", "criterion exact", "clamp gelu", "attack 2 min 43 s"):
        assert words in text
    for note in results.notes:
        assert note in text


def test_csv_holds_the_counts_unrounded(results: RunResults) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_table(results))))
    assert len(rows) == 6
    mixed = next(row for row in rows if (row["classifier"], row["images"]) == ("mixed", "robust"))
    count = results.row("mixed").robust
    assert (int(mixed["correct"]), int(mixed["total"])) == (count.correct, count.total)
    assert float(mixed["percent"]) == count.percent


def test_latex_has_one_row_a_classifier(results: RunResults) -> None:
    lines = latex_table(results).splitlines()
    assert [line.split("&")[0].strip() for line in lines if line.endswith(r"\\")][1:] == ["std", "rob", "mixed"]
    assert sum(line.startswith("%") for line in lines) == 1


def test_latex_comment_cannot_be_left_by_a_name() -> None:
    table = latex_table(made_up_results(40, name="a\n\\input{x}"))
    assert table.splitlines()[0].startswith("% a \\input{x}")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (99.9, "99.9 s"), (725.2, "12 min 05 s"), (12000, "3 h 20 min")]
)
def test_seconds(seconds: float, words: str) -> None:
    assert seconds_text(seconds) == words


def test_threat_in_grey_levels_where_it_is_one() -> None:
    assert threat_text(ThreatModel("Linf", 8 / 255)) == "Linf, eps = 8/255"
    assert threat_text(ThreatModel("Linf", 0.1)) == "Linf, eps = 0.1"
    assert threat_text(ThreatModel("L2", 0.5)) == "L2, eps = 0.5"


def test_weight_is_told_from_one() -> None:
    assert weight_text(0.875, 0.125) == "0.8750"
    assert weight_text(1 - 1.19e-7, 1.19e-7) == "0.999999881"
    assert weight_text(1.0, 0.0) == "1.0000"

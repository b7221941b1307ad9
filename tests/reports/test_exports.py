"""The CSV and LaTeX files beside the page."""

import csv
import io

import pytest
from mixednuts_dist.reports.exports import TABLES, DataTable, exported_files

from mixednuts_dist.reports.counts import Count
from mixednuts_dist.reports.results import RunResults


def rows_of(content: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content)))


def test_counts_become_columns_in_csv_and_an_interval_in_latex() -> None:
    table = DataTable(["after", "standing", "lost"], [["apgd-ce", Count(30, 40), 7], ["fab-t", None, 0.123456]])
    (first, second) = rows_of(table.as_csv())
    assert (first["standing_correct"], first["standing_total"], first["standing_percent"]) == ("30", "40", "75.0")
    assert second["standing_low"] == ""
    assert second["lost"] == "0.123456"
    lines = table.as_latex("a\ncomment").splitlines()
    assert lines[0] == "% a comment"
    assert r"  apgd-ce & 75.0 [59.8, 85.8] & 7 \\" in lines
    assert r"  fab-t & -- & 0.1235 \\" in lines


def test_names_cannot_break_latex() -> None:
    table = DataTable(["run_id"], [["50%_a&b{c}\\d"]]).as_latex("x")
    assert r"50\%\_a\&b\{c\}\textbackslash{}d" in table
    assert "run id" in table


def test_every_table_has_its_rows(results: RunResults) -> None:
    files = exported_files(results)
    assert {f"{name}.csv" for name in TABLES} <= set(files)
    assert len(rows_of(files["tradeoff.csv"])) == len(results.search.entries)
    assert len(rows_of(files["sensitivity.csv"])) == len(results.candidates)
    assert [row["run"] for row in rows_of(files["measured.csv"])] == [point.run_id for point in results.measured]
    assert [row["after"] for row in rows_of(files["survival.csv"])] == [step.step for step in results.survival]


def test_histogram_file_counts_every_image(results: RunResults) -> None:
    rows = rows_of(exported_files(results)["margins.csv"])
    for group in results.margins:
        key = (group.classifier, group.images, "correct" if group.correct else "incorrect")
        counted = sum(int(r["n"]) for r in rows if (r["classifier"], r["images"], r["prediction"]) == key)
        assert counted == len(group.margins)


def test_medians_and_gap_are_the_groups(results: RunResults) -> None:
    row = next(r for r in rows_of(exported_files(results)["medians.csv"]) if r["classifier"] == "rob+M")
    assert float(row["margin_gap"]) == pytest.approx(float(row["attacked_correct"]) - float(row["clean_incorrect"]))

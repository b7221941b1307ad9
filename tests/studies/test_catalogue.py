"""The documentation lists every study; a user's file adds one, and a chart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mixednuts_dist.register import CHARTS, STUDIES, load_extensions

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"
TOY = """
from mixednuts_dist.register import CHARTS, STUDIES
from mixednuts_dist.reports.charts import bars
from mixednuts_dist.reports.table import Table
from mixednuts_dist.studies.study import Outcome


@CHARTS("toy-chart", describes="How many images there are")
def toy_chart(results):
    return bars([{"name": "all", "value": float(results.n_images)}], value="images")


@STUDIES("toy-study", describes="How many images there are", section="none")
def toy_study(bench):
    n_images = len(bench.rows.labels_N)
    figure = bars([{"name": "all", "value": float(n_images)}], value="images")
    return Outcome(Table(["images", "n"], [["all", n_images]]), figure, (f"There are {n_images} images.",))
"""


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[None]:
    """The toy entries; they leave the registers afterwards."""
    file = tmp_path / "toy.py"
    file.write_text(TOY)
    load_extensions([str(file)])
    yield
    for register, name in ((CHARTS, "toy-chart"), (STUDIES, "toy-study")):
        register._made.pop(name)
        register._added.pop(name)


def test_the_page_lists_every_study() -> None:
    page = PAGE.read_text()
    for entry in STUDIES.entries().values():
        assert f"| `{entry.name}` | {entry.facts['section']} | {entry.describes} |" in page


@pytest.mark.usefixtures("toy")
def test_a_chart_of_a_users_file_is_on_the_page_and_beside_it() -> None:
    from mixednuts_dist.reports.page import report_files
    from tests.reports.made_up_run import made_up_results

    files = report_files(made_up_results(40))
    assert b'data-chart="toy-chart"' in files["index.html"]
    assert files["toy-chart-5.5in.pdf"].startswith(b"%PDF")


@pytest.mark.usefixtures("toy")
def test_a_study_of_a_users_file_runs_like_the_others(bench, monkeypatch, capsys) -> None:
    from mixednuts_dist.studies import study as studies

    monkeypatch.setattr(studies, "Bench", lambda *_, **__: bench)
    (outcome,) = studies.run(bench.config, "toy-study").values()
    assert outcome.findings == ("There are 24 images.",)
    assert "There are 24 images." in capsys.readouterr().out
    assert bench.run.store.exists("studies/toy-study/figure-3.25in.png")

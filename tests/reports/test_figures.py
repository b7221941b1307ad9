"""The figures carry the counts, fit a phone, and name no address."""

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from mixednuts_dist.config.register import CHARTS, CRITERIA
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.reports.charts import histograms
from mixednuts_dist.reports.drawing import Figure
from mixednuts_dist.reports.figures import caption, figures
from mixednuts_dist.reports.margins import stored_margins
from mixednuts_dist.reports.results import RunResults, predicted
from mixednuts_dist.stages.stage import Certified
from tests.helpers.made_up_run import made_up_attack, made_up_results

pytestmark = pytest.mark.usefixtures("pictures")


def rows_of(figure: Figure) -> list[dict[str, Any]]:
    """Return the rows of all layers of all panels."""
    return [row for panel in figure.panels for layer in panel["layer"] for row in layer["data"]["values"]]


@pytest.fixture(scope="module")
def charts(results: RunResults) -> dict[str, Figure]:
    """Every chart, with synthetic certificates."""
    betas = [entry.beta for entry in results.search.entries]
    certified = Certified(
        claim="made up", radii=(0.01, 0.02), by_beta=dict.fromkeys(betas, (90, 40)), reach=[0.01] * 300, total=300,
        by_radius={name: [(0.005 * step, 120 - 12 * step) for step in range(10)] for name in ("rob", "mixed")},
    )  # fmt: skip
    return figures(dataclasses.replace(results, certified=certified))


@pytest.mark.parametrize("name", CHARTS.names())
def test_every_panel_fits_a_phone_and_has_marks(charts: dict[str, Figure], name: str) -> None:
    assert len(caption(name)) > 60
    assert "http" not in json.dumps(list(charts[name].panels), allow_nan=False)
    for text in charts[name].svgs(name):
        svg = ET.fromstring(text)
        assert 150 < float(svg.attrib["width"]) < 450
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 3
    assert charts[name].pdf().startswith(b"%PDF")


def test_ids_of_two_panels_differ(charts: dict[str, Figure]) -> None:
    drawn = charts["tradeoff"].svgs("tradeoff")
    found = [set(re.findall(r'id="([^"]+)"', svg)) for svg in drawn]
    assert found[0] and found[1] and not found[0] & found[1]
    for svg, ids in zip(drawn, found, strict=True):
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids


@pytest.mark.parametrize("n_images", [1, 12])
def test_draws_where_groups_are_empty(n_images: int) -> None:
    for name, figure in figures(made_up_results(n_images, betas=(0.9,))).items():
        assert all("<svg" in svg for svg in figure.svgs(name))


def test_tradeoff_shows_every_beta_and_the_measured_counts(results: RunResults) -> None:
    rows = rows_of(figures(results)["tradeoff"])
    curve = {(row["clean"], row["robust"]) for row in rows if "order" in row}
    assert curve == {tuple(count.percent for count in predicted(entry)) for entry in results.search.entries}
    marks = [row for row in rows if row.get("name", "") == row.get("series")]
    measured = {row["series"]: (row["clean"], row["robust"]) for row in marks}
    assert measured == {row.classifier: (row.clean.percent, row.robust.percent) for row in results.accuracy}


def test_sensitivity_shows_candidates_and_marks_the_selected(results: RunResults) -> None:
    panels, chosen = figures(results)["sensitivity"].panels, results.parameters
    rows = [row for row in rows_of(Figure(panels)) if "objective" in row]
    assert {(row["s"], row["p"], row["c"]): row["objective"] for row in rows} == {
        (row["scale"], row["power"], row["bias"]): (
            100 * row["objective"] if row["feasible"] and row["deployable"] else None
        )
        for row in results.candidates
    }
    rings = {panel["title"]: panel["layer"][-1]["data"]["values"] for panel in panels}
    assert {title: ring for title, ring in rings.items() if ring} == {
        f"p = {chosen.power:g}": [{"s": chosen.scale, "c": chosen.bias}]
    }


def test_name_of_a_criterion_decides_no_color_or_label(results: RunResults, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = CRITERIA.get(results.search.criterion)
    renamed = dataclasses.replace(results, found=dataclasses.replace(results.search, criterion="clean-count"))
    monkeypatch.setattr(CRITERIA, "get", {"exact": exact, "clean-count": exact}.__getitem__)
    assert figures(renamed)["sensitivity"] == figures(results)["sensitivity"]


def test_sensitivity_of_a_fine_grid_keeps_the_selected_slice(results: RunResults) -> None:
    fine = tuple({**row, "power": 1 + i} for i in range(40) for row in results.candidates[:3])
    row = results.candidates[0]
    chosen = dataclasses.replace(results.parameters, scale=row["scale"], power=18.0, bias=row["bias"])
    search = dataclasses.replace(results.search, entries=(chosen,))
    figure = figures(dataclasses.replace(results, candidates=fine, found=search))["sensitivity"]
    titles = [panel["title"] for panel in figure.panels]
    assert len(titles) == 12
    assert "p = 18" in titles


@pytest.mark.parametrize("scale", [5.0, 50.0])
def test_histograms_count_every_image_once(scale: float) -> None:
    """The larger scale takes margins to 1 - 1e-300."""
    margins = stored_margins(made_up_attack(), LogitTransform(scale, 6.0, 0.4), None)
    groups = {"right": margins["rob+M", "attacked, right"], "wrong": margins["rob+M", "clean, wrong"]}
    rows = rows_of(histograms({"rob+M": groups}, columns=1))
    for name, group in groups.items():
        distances = group.double().numpy()
        odds = np.log10(-np.expm1(distances)) - distances / math.log(10)
        bins = [row for row in rows if row["series"] == name and row.get("right", 0) > row["left"]]
        shares = [row["share"] for row in bins]
        assert sum(shares) == pytest.approx(100) and max(shares) < 30
        for row in bins[1:-1]:
            assert row["share"] == pytest.approx(100 * ((odds >= row["left"]) & (odds < row["right"])).mean(), abs=1)
        assert [row["left"] for row in rows if row["series"] == name and "share" not in row] == [np.median(odds)]

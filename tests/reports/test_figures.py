"""The figures draw in the room they are given, carry the counts, and name no address."""

import dataclasses
import json
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.config.register import CHARTS, load_extensions
from mixednuts_dist.reports.charts import RIGHT_AND_WRONG, bars, maps
from mixednuts_dist.reports.drawing import (
    CLASSIFIER_COLOURS,
    NARROW,
    PAPER,
    WIDE,
    Chart,
    Frame,
    chart_files,
    drawn,
    vega_config,
)
from mixednuts_dist.reports.figures import caption, figures
from mixednuts_dist.reports.margins import EDGES
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.stages.stage import Certified
from tests.helpers.made_up_run import made_up_results

pytestmark = pytest.mark.usefixtures("pictures")


def rows_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of all of a specification's data, wherever Altair put them."""
    found = [row for rows in spec.get("datasets", {}).values() for row in rows]
    pending: list[Any] = [spec]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found += node.get("data", {}).get("values", []) if isinstance(node.get("data"), dict) else []
            pending += [value for key, value in node.items() if key != "datasets"]
        elif isinstance(node, list):
            pending += node
    return found


def spec_of(results: RunResults, name: str) -> dict[str, Any]:
    return drawn(figures(results)[name], WIDE)[0]


@pytest.fixture(scope="module")
def charts(results: RunResults) -> dict[str, Chart]:
    """Every chart: certificates are made up beside the run."""
    betas = [entry.beta for entry in results.search.entries]
    certified = Certified(
        claim="made up", norm="Linf", radii={0.01: "0.01", 0.02: "0.02"}, by_beta=dict.fromkeys(betas, (90, 40)),
        by_radius={name: [(0.005 * step, 120 - 12 * step) for step in range(10)] for name in ("rob", "mixed")},
        reach=[0.01] * 300, total=300,
    )  # fmt: skip
    return figures(dataclasses.replace(results, certified=certified))


@pytest.mark.parametrize("frame", [WIDE, NARROW, *PAPER], ids=lambda frame: frame.name)
@pytest.mark.parametrize("name", CHARTS.names())
def test_fills_its_frame_and_not_more(charts: dict[str, Chart], name: str, frame: Frame) -> None:
    _, picture = drawn(charts[name], frame)
    svg = ET.fromstring(picture)
    width = float(svg.attrib["width"])
    assert width <= frame.width
    assert width >= 0.6 * frame.width, "a figure may be narrower where its marks would be no clearer"
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10
    sizes = {text.attrib["font-size"] for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert sizes == {f"{frame.font}px"}, "every text has the frame's size: 8 pt on paper"


def test_paper_figures_have_300_dots_an_inch() -> None:
    files = chart_files("x", bars([{"name": "a", "value": 1.0}, {"name": "b", "value": 2.0}], value="images"))
    assert set(files) == {"x.svg", "x-dark.svg"} | {
        f"x-{w}.{kind}" for w in ("3.25in", "5.5in") for kind in ("pdf", "png")
    }
    for inches in (3.25, 5.5):
        width, _ = struct.unpack(">II", files[f"x-{inches}in.png"][16:24])
        assert 0.9 * 300 * inches <= width <= 300 * inches
        assert files[f"x-{inches}in.pdf"].startswith(b"%PDF")


@pytest.mark.parametrize("n_images", [1, 12])
def test_draws_where_groups_are_empty(n_images: int) -> None:
    for chart in figures(made_up_results(n_images, betas=(0.9,))).values():
        assert b"<svg" in drawn(chart, NARROW)[1]


def test_specifications_name_no_address_and_say_what_they_show(charts: dict[str, Chart]) -> None:
    for name, chart in charts.items():
        spec, _ = drawn(chart, WIDE)
        assert "http" not in json.dumps(spec, allow_nan=False)
        assert len(spec["description"]) > 60
        assert len(caption(name)) > 60


def test_tradeoff_shows_every_beta_and_the_measured_counts(results: RunResults) -> None:
    rows = rows_of(spec_of(results, "tradeoff"))
    assert {row["beta"] for row in rows if "beta" in row} == {entry.beta for entry in results.search.entries}
    measured = {row["name"]: (row["clean"], row["robust"]) for row in rows if row.get("attack") and row["name"]}
    assert measured == {
        **{row.classifier: (row.clean.percent, row.robust.percent) for row in results.accuracy},
    }


def test_tradeoff_draws_the_exact_front_where_the_search_has_stored_it(results: RunResults) -> None:
    front = results.search.entries[2:6]
    stored = dataclasses.replace(results, found=dataclasses.replace(results.search, front=front))
    drawn_front = [row for row in rows_of(spec_of(stored, "tradeoff")) if row.get("series") == "best of all candidates"]
    assert {(row["clean"], row["robust"]) for row in drawn_front} == {
        (100 * choice.clean_correct / choice.total, 100 * choice.kept_predicted / choice.total) for choice in front
    }


def test_sensitivity_shows_every_usable_candidate_and_marks_the_selected(results: RunResults) -> None:
    rows = [row for row in rows_of(spec_of(results, "sensitivity")) if "objective" in row]
    shown = {(row["s"], row["p"], row["c"]): row["objective"] for row in rows}
    assert shown == {
        (row["scale"], row["power"], row["bias"]): (
            100 * row["objective"] if row["feasible"] and row["deployable"] else None
        )
        for row in results.candidates
    }
    chosen = results.parameters
    assert {(row["s"], row["p"], row["c"]) for row in rows if row["selected"]} == {
        (chosen.scale, chosen.power, chosen.bias)
    }


def test_the_maps_of_a_criterion_under_another_name_are_the_same(results: RunResults, tmp_path: Path) -> None:
    """No colour and no label is decided by the name: a user's maximised criterion is drawn as one."""
    file = tmp_path / "renamed_criterion.py"
    file.write_text(
        "from mixednuts_dist.config.register import CRITERIA\n"
        "from mixednuts_dist.selection.criteria import ExactCriterion\n\n"
        '@CRITERIA("clean-count", describes="exact under another name")\nclass Renamed(ExactCriterion):\n'
        '    name = "clean-count"\n'
    )
    load_extensions([str(file)])
    assert results.search.criterion == "exact"
    renamed = dataclasses.replace(results, found=dataclasses.replace(results.search, criterion="clean-count"))
    assert spec_of(renamed, "sensitivity") == spec_of(results, "sensitivity")


def test_sensitivity_of_a_fine_grid_keeps_the_selected_slice(results: RunResults) -> None:
    fine = tuple({**row, "power": 1 + i} for i in range(40) for row in results.candidates[:3])
    row = results.candidates[0]
    chosen = dataclasses.replace(results.parameters, scale=row["scale"], power=18.0, bias=row["bias"])
    search = dataclasses.replace(results.search, entries=(chosen,))
    spec = spec_of(dataclasses.replace(results, candidates=fine, found=search), "sensitivity")
    titles = [row["words"] for rows in spec["datasets"].values() for row in rows if "words" in row]
    assert len(titles) == 12
    assert "p = 18" in titles


def test_a_long_key_leaves_the_maps_their_room_in_a_papers_column() -> None:
    cells = [
        {"s": s, "p": p, "c": c, "objective": s * c, "selected": s == p == c}
        for s in (1.0, 2.0) for p in (1.0, 2.0) for c in (1.0, 2.0)
    ]  # fmt: skip
    chart = maps(cells, meaning="clean and wrong images above the cutoff (%)", maximised=False)
    assert min(panel["width"] for panel in drawn(chart, PAPER[0])[0]["concat"]) > 70


def test_a_run_without_candidates_has_no_maps(results: RunResults) -> None:
    assert "sensitivity" not in figures(dataclasses.replace(results, candidates=()))


def test_histograms_count_every_image_once(results: RunResults) -> None:
    for group in results.margins:
        assert sum(group.counts) == group.n
        assert len(group.counts) == len(EDGES) - 1
    shares = [
        row["share"] for row in rows_of(spec_of(results, "margins")) if "share" in row and row["right"] > row["left"]
    ]
    assert sum(shares) == pytest.approx(100 * 2 * len(results.splits))


def test_a_papers_column_has_one_panel_and_a_page_has_two(results: RunResults) -> None:
    panels = {frame.name: len(drawn(figures(results)["tradeoff"], frame)[0]["concat"]) for frame in (WIDE, *PAPER)}
    assert panels == {"wide": 2, "3.25in": 1, "5.5in": 2}


def test_one_round_needs_no_figure(results: RunResults) -> None:
    assert "rounds" in figures(results)
    once = dataclasses.replace(results.search, rounds=results.search.rounds[-1:])
    assert "rounds" not in figures(dataclasses.replace(results, found=once))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("config", [vega_config(), vega_config(dark=True)])
def test_mark_colours_stand_out_from_both_backgrounds(config: dict[str, Any]) -> None:
    background = luminance(config["background"])
    for colour in [*CLASSIFIER_COLOURS.values(), *RIGHT_AND_WRONG.values()]:
        low, high = sorted((background, luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 3

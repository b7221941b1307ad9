"""The figures draw, carry the counts, and name no address."""

import dataclasses
import json
import struct
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from mixednuts_dist.reports.chart_style import CLASSIFIER_COLOURS, PREDICTION_COLOURS, dark_config, light_config
from mixednuts_dist.reports.figures import FIGURES, build_figures, figure_spec, static_png, static_svg
from mixednuts_dist.reports.results import RunResults

from .made_up_run import made_up_results


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


@pytest.mark.parametrize("layout", ["wide", "narrow"])
@pytest.mark.parametrize("name", FIGURES)
def test_draws_as_svg(results: RunResults, name: str, layout: Any) -> None:
    spec = figure_spec(build_figures(results, layout=layout)[name])
    svg = ET.fromstring(static_svg(spec))
    width = float(svg.attrib["width"])
    assert width <= {"wide": 808, "narrow": 350}[layout]
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10


def test_draws_as_png_at_double_size(results: RunResults) -> None:
    spec = figure_spec(build_figures(results)["survival"])
    png = static_png(spec)
    assert png.startswith(b"\x89PNG")
    (width,) = struct.unpack(">I", png[16:20])
    assert width == pytest.approx(2 * float(ET.fromstring(static_svg(spec)).attrib["width"]), abs=2)


@pytest.mark.parametrize("n_images", [1, 12])
def test_draws_where_groups_are_empty(n_images: int) -> None:
    for chart in build_figures(made_up_results(n_images, betas=(0.9,))).values():
        assert b"<svg" in static_svg(figure_spec(chart))


def test_specifications_name_no_address_and_say_what_they_show(results: RunResults) -> None:
    for chart in build_figures(results).values():
        spec = figure_spec(chart)
        assert "http" not in json.dumps(spec, allow_nan=False)
        assert len(spec["description"]) > 60


def test_tradeoff_shows_every_beta_and_the_measured_counts(results: RunResults) -> None:
    rows = rows_of(figure_spec(build_figures(results)["tradeoff"]))
    assert {row["beta"] for row in rows if "beta" in row} == {entry.beta for entry in results.search.entries}
    measured = {row["label"]: (row["clean"], row["robust"]) for row in rows if "attack" in row}
    sibling = results.measured[-1]
    assert measured == {
        **{row.classifier: (row.clean.percent, row.robust.percent) for row in results.accuracy},
        f"β {sibling.parameters.beta:g}": (sibling.clean.percent, sibling.robust.percent),
    }


def test_sensitivity_shows_every_usable_candidate_and_marks_the_selected(results: RunResults) -> None:
    rows = rows_of(figure_spec(build_figures(results)["sensitivity"]))
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


def test_sensitivity_of_a_fine_grid_keeps_the_selected_slice(results: RunResults) -> None:
    fine = tuple({**row, "power": 1 + i} for i in range(40) for row in results.candidates[:3])
    chosen = dataclasses.replace(results.parameters, power=18.0)
    search = dataclasses.replace(results.search, entries=(chosen,))
    spec = figure_spec(build_figures(dataclasses.replace(results, candidates=fine, search=search))["sensitivity"])
    titles = [panel["title"] for panel in spec["concat"]]
    assert len(titles) == 12
    assert "p = 18" in titles


def test_a_run_without_candidates_has_no_maps(results: RunResults) -> None:
    assert "sensitivity" not in build_figures(dataclasses.replace(results, candidates=()))


def test_histograms_count_every_image_once(results: RunResults) -> None:
    rows = rows_of(figure_spec(build_figures(results)["margins"]))
    bins = {(r["classifier"], r["images"], r["prediction"], r["left"]): r for r in rows if r.get("kind") == "bin"}
    for group in results.margins:
        key = (group.classifier, group.images, "correct" if group.correct else "incorrect")
        shares = [row["share"] for (*found, left), row in bins.items() if tuple(found) == key and left < 1]
        assert sum(shares) == pytest.approx(100 if group.margins else 0, abs=0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("config", [light_config(), dark_config()])
def test_mark_colours_stand_out_from_both_backgrounds(config: dict[str, Any]) -> None:
    background = luminance(config["background"])
    for colour in [*CLASSIFIER_COLOURS.values(), *PREDICTION_COLOURS.values()]:
        low, high = sorted((background, luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 3

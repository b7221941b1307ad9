"""Marks that lie close together keep labels that can be read."""

from itertools import combinations
from typing import Any

import pytest

from mixednuts_dist.reports.counts import Count
from mixednuts_dist.reports.drawing import WIDE, drawn
from mixednuts_dist.reports.scatter import accuracy_scatter

pytestmark = pytest.mark.usefixtures("pictures")


def labels(counts: dict[str, tuple[int, int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(mark, row) of every label in the chart of classifiers with these clean and robust counts of 1000."""
    points = {name: [(name, Count(clean, 1000), Count(robust, 1000))] for name, (clean, robust) in counts.items()}
    chart, _ = drawn(accuracy_scatter(points), WIDE)
    texts = [layer for layer in chart["layer"] if layer["mark"]["type"] == "text"]
    return [(layer["mark"], row) for layer in texts for row in chart["datasets"][layer["data"]["name"]]]


def test_labels_of_near_marks_stand_at_different_sides() -> None:
    found = labels({"LayerNorm only": (900, 600), "GELU only": (901, 600), "none": (900, 601), "far": (500, 100)})
    assert sorted(row["name"] for _, row in found) == ["GELU only", "LayerNorm only", "far", "none"]
    near = [mark for mark, row in found if row["name"] != "far"]
    for one, other in combinations(near, 2):
        assert (one["align"], one["dx"], one["dy"]) != (other["align"], other["dx"], other["dy"])


def test_marks_that_coincide_share_a_label() -> None:
    found = labels({"one": (900, 600), "other": (900, 600)})
    assert [row["name"] for _, row in found] == ["one, other"]

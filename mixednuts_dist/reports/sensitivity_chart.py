"""How the objective depends on s, p and c: one colour map over (c, s) for each p (paper, appendix D.1)."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from .chart_style import Layout, text_layer, values
from .results import RunResults

MAXIMISED = ("exact",)  # criteria whose objective is the better the larger
_MEANINGS = {
    "exact": "clean accuracy of the mixture (%)",
    "paper": "clean and wrong images above the cutoff (%)",
}
_LARGEST_NUMBER_OF_SLICES = 12


def sensitivity_chart(results: RunResults, layout: Layout) -> alt.TopLevelMixin:
    """One panel a power, all with one colour scale; darker is better, a ring marks the selected candidate."""
    rows = sensitivity_rows(results)
    powers = _shown_powers(sorted({row["p"] for row in rows}), results.parameters.power)
    columns, width = {"wide": (4, 168), "narrow": (2, 128)}[layout]
    found = [row["objective"] for row in rows if row["objective"] is not None]
    colour = _colour(results.search.criterion, (min(found, default=0.0), max(found, default=1.0)))
    panels = [
        _panel([row for row in rows if row["p"] == power], colour, width, f"p = {power:.4g}", first=not i % columns)
        for i, power in enumerate(powers)
    ]
    chart = alt.concat(*panels, columns=columns, spacing={"row": 62, "column": 14}, bounds="flush")
    shared: alt.ConcatChart = chart.resolve_scale(color="shared")
    return shared.properties(description=sensitivity_description(results))


def sensitivity_rows(results: RunResults) -> list[dict[str, Any]]:
    """Every candidate at the deployed beta: s, p, c, the objective in percent (None: it cannot be used), selected."""
    chosen = results.parameters
    return [
        {
            "s": row["scale"],
            "p": row["power"],
            "c": row["bias"],
            "objective": 100 * row["objective"] if row["feasible"] and row["deployable"] else None,
            "selected": (row["scale"], row["power"], row["bias"]) == (chosen.scale, chosen.power, chosen.bias),
        }
        for row in results.candidates
    ]


def sensitivity_description(results: RunResults) -> str:
    """The chart in words."""
    rows, chosen = sensitivity_rows(results), results.parameters
    found = [row["objective"] for row in rows if row["objective"] is not None]
    span = f"between {min(found):.1f} and {max(found):.1f} %" if found else "nowhere defined"
    return (
        f"Colour maps of the objective, {meaning(results.search.criterion)}, over bias c and scale s, one for each "
        f"power p, at beta {chosen.beta:g}. Over {len(rows)} candidates it lies {span}; {len(rows) - len(found)} "
        f"cannot be used. Selected: s {chosen.scale:.4g}, p {chosen.power:.4g}, c {chosen.bias:.4g}."
    )


def meaning(criterion: str) -> str:
    """What the objective counts, with its unit."""
    return _MEANINGS.get(criterion, "objective (%)")


def _shown_powers(powers: Sequence[float], chosen: float) -> list[float]:
    """All of them, or an even choice of them with the selected one among them."""
    if len(powers) <= _LARGEST_NUMBER_OF_SLICES:
        return list(powers)
    last = _LARGEST_NUMBER_OF_SLICES - 1
    picked = {powers[round(i * (len(powers) - 1) / last)] for i in range(last + 1)}
    nearest = min(picked, key=lambda power: abs(power - chosen))
    return sorted((picked - {nearest}) | {chosen})


def _panel(
    rows: list[dict[str, Any]], colour: alt.Color, width: int, title: str, *, first: bool
) -> alt.LayerChart | alt.FacetChart:
    """One map; only the first of a row carries the labels of s, the grid is the same in all."""
    x = alt.X("c:O", title="bias c", axis=_labels(shown=True))
    y = alt.Y("s:O", title="scale s" if first else None, sort="descending", axis=_labels(shown=first))
    columns, lines = (len({row[name] for row in rows}) for name in ("c", "s"))
    tooltip = [
        alt.Tooltip(f"{field}:Q", title=title, format=number)
        for field, title, number in (
            ("s", "s", ".4~g"),
            ("p", "p", ".4~g"),
            ("c", "c", ".4~g"),
            ("objective", "objective (%)", ".2f"),
        )
    ]
    usable = [row for row in rows if row["objective"] is not None]
    unusable = [row for row in rows if row["objective"] is None]
    selected = [row for row in rows if row["selected"]]
    cells = alt.Chart(values(usable)).mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    crosses = text_layer(values(unusable), opacity=0.6).encode(x=x, y=y, text=alt.value("×"))
    ring = alt.Chart(values(selected)).encode(x=x, y=y, tooltip=tooltip)
    rings = [ring.mark_point(size=90, stroke=ink, strokeWidth=w) for ink, w in (("#1f2328", 5), ("#ffffff", 2.5))]
    sides = {"width": max(1, width // columns) * columns, "height": max(1, width // lines) * lines}
    return alt.layer(cells, crosses, *rings).properties(title=title, **sides)  # whole pixels a cell: no seams


def _labels(*, shown: bool) -> alt.Axis:
    return alt.Axis(format=".2~g", labels=shown, labelOverlap=True, labelAngle=0, grid=False, ticks=False, domain=False)


def _colour(criterion: str, domain: tuple[float, float]) -> alt.Color:
    scale = alt.Scale(scheme="viridis", reverse=criterion in MAXIMISED, domain=list(domain), nice=False)
    legend = alt.Legend(
        title=f"{meaning(criterion)}; darker is better", orient="top", gradientLength=240, titleLimit=400, format=".3~g"
    )
    return alt.Color("objective:Q", scale=scale, legend=legend)

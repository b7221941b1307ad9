"""The chart of certificates: what is certified beside what an attack left, over beta and over the radius."""

from typing import Any

import altair as alt

from ..config.register import CHARTS
from .charts import beside, lines
from .counts import Count, percent_text
from .drawing import Chart, Frame, Row, described, layered, values
from .figures import SELECTED_BETA
from .results import RunResults, predicted

_MOST_RADII = 3  # in the panel over beta, beside clean and attacked


@CHARTS(
    "certified",
    describes="What is certified, against what an attack left, over beta and over the radius",
    caption="Left: for every beta, clean accuracy and what stays right under the stored perturbations, both predicted, "
    "and what is certified at each radius; the line marks the slider’s beta. Right: what is certified of rob alone and "
    "of the deployed mixture as the radius grows, and where the norms agree what the attack left of the mixture.",
    order=6,
)
def certified(results: RunResults) -> Chart | None:
    """Two panels; None for a run without certificates or without a search."""
    found = results.certified
    if found is None or results.found is None:
        return None
    by_radius = [
        {"x": radius, "y": Count(n, found.total).percent, "series": f"{name}, certified"}
        for name, steps in found.by_radius.items()
        for radius, n in steps
    ]
    if found.norm == results.threat.norm:
        mixed = results.row("mixed")
        by_radius.append({"x": results.threat.eps, "y": mixed.robust.percent, "series": "mixed, attacked"})
    over_beta = _over_beta(results)
    panels = beside(
        _with_slider(lines(over_beta, x="beta", y="images (%)"), [float(row["x"]) for row in over_beta]),
        lines(by_radius, x=f"{found.norm} radius", y="images (%)"),
    )

    def draw(frame: Frame) -> Any:
        return {**panels(frame), "params": [{"name": SELECTED_BETA, "value": results.parameters.beta}]}

    return described(draw, _words(results))


def _over_beta(results: RunResults) -> list[Row]:
    found, rows = results.certified, list[Row]()
    assert found is not None
    shown = list(enumerate(found.radii.values()))
    if len(shown) > _MOST_RADII:
        shown = [shown[0], shown[len(shown) // 2], shown[-1]]
    entries = sorted(results.search.entries, key=lambda entry: entry.beta)
    for series, count_of in (("clean", 0), ("attacked", 1)):
        rows += [{"x": entry.beta, "y": predicted(entry)[count_of].percent, "series": series} for entry in entries]
    for at, words in shown:
        rows += [
            {
                "x": entry.beta,
                "y": Count(found.by_beta[entry.beta][at], found.total).percent,
                "series": f"certified at {words}",
            }
            for entry in entries
        ]
    return rows


def _with_slider(chart: Chart, betas: list[float]) -> Chart:
    """The chart with a line at the slider's beta."""

    def draw(frame: Frame) -> Any:
        drawn, line = chart(frame), alt.Chart(values([{"x": beta} for beta in sorted(set(betas))]))
        rule = line.transform_filter(f"datum.x === {SELECTED_BETA}").mark_rule(strokeDash=[2, 3], strokeWidth=1.2)
        layers = {"layer": drawn["layer"]}, rule.encode(x=alt.X("x:Q"))
        return layered(*layers, width=drawn["width"], height=drawn["height"])

    return draw


def _words(results: RunResults) -> str:
    found, beta = results.certified, results.parameters.beta
    assert found is not None
    each = ", ".join(
        f"{percent_text(Count(n, found.total))} % at {words}"
        for words, n in zip(found.radii.values(), found.by_beta[beta], strict=True)
    )
    return f"Certified images over beta and over the {found.norm} radius. The deployed mixture: {each}."

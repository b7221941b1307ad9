"""The confidence margins of std, rob, rob behind LayerNorm and rob behind M (fig:conf, tab:margin_hist)."""

import altair as alt

from ..reports.chart_style import values
from ..reports.confidence import CLASSIFIERS, MarginGroup, margin_gap, margin_groups
from .bench import Bench
from .outcome import Outcome, StudyTable

N_BINS = 20


def margin_histograms(bench: Bench) -> Outcome:
    """Medians and gaps in the table, histograms in the figure."""
    groups = margin_groups(bench.rows, bench.search)
    gaps = {name: margin_gap(groups, name) for name in CLASSIFIERS}
    rows = tuple(
        (f"{group.classifier}, {group.images}, {_side(group)}", len(group.margins), group.median) for group in groups
    )
    gap_rows = tuple((f"{name}, margin gap", None, gap) for name, gap in gaps.items())
    findings = tuple(
        f"{name}: the median of attacked and right images minus that of clean and wrong ones is {gap:+.3f}."
        for name, gap in gaps.items()
        if gap is not None
    )
    largest = max((name for name in gaps if gaps[name] is not None), key=lambda name: gaps[name] or 0.0, default=None)
    closing = (f"The largest margin gap is that of {largest}.",) if largest else ()
    table = StudyTable(("group", "images", "median margin"), (*rows, *gap_rows))
    return Outcome(table, _histograms(groups), (*findings, *closing))


def _side(group: MarginGroup) -> str:
    return "right" if group.correct else "wrong"


def _histograms(groups: tuple[MarginGroup, ...]) -> alt.TopLevelMixin:
    """Share of each group's images by margin; one panel a classifier and kind of image."""
    rows = []
    for group in groups:
        counts = [0] * N_BINS
        for margin in group.margins:
            counts[min(N_BINS - 1, int(margin * N_BINS))] += 1
        rows += [
            {"classifier": group.classifier, "images": group.images, "prediction": _side(group),
             "from": i / N_BINS, "to": (i + 1) / N_BINS, "share": 100 * n / len(group.margins)}
            for i, n in enumerate(counts) if group.margins
        ]  # fmt: skip
    colour = alt.Color(
        "prediction:N",
        scale=alt.Scale(domain=["right", "wrong"], range=["#0f8f84", "#b5761a"]),
        legend=alt.Legend(orient="top", title="prediction"),
    )
    bars = alt.Chart(values(rows)).mark_bar(opacity=0.6).encode(
        x=alt.X("from:Q", bin="binned", title="confidence margin", scale=alt.Scale(domain=[0, 1])),
        x2="to:Q",
        y=alt.Y("share:Q", title="share of the group (%)", stack=None),
        color=colour,
    )  # fmt: skip
    panels: alt.FacetChart = bars.properties(width=150, height=110).facet(
        column=alt.Column("classifier:N", sort=list(CLASSIFIERS), title=None),
        row=alt.Row("images:N", sort=["clean", "attacked"], title=None),
    )
    return panels

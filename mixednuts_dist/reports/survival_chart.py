"""What each step of the adaptive attack leaves standing."""

import altair as alt

from .chart_style import CLASSIFIER_COLOURS, Layout, text_layer, values
from .results import RunResults


def survival_chart(results: RunResults, layout: Layout) -> alt.TopLevelMixin:
    """One bar a step: the share of images that the mixture still has right after it."""
    rows = values(
        [
            {
                "step": step.step,
                "percent": step.standing.percent,
                "standing": step.standing.correct,
                "lost": step.lost,
                "label": f"{step.standing.correct}" + (f"  (−{step.lost})" if step.lost and number else ""),
            }
            for number, step in enumerate(results.survival)
        ]
    )
    order = [step.step for step in results.survival]
    y = alt.Y("step:N", sort=order, title=None, axis=alt.Axis(ticks=False, domain=False))
    x = alt.X("percent:Q", title="right after this step (%)", scale=alt.Scale(domain=[0, 100]))
    tooltip = [
        alt.Tooltip("step:N", title="after"),
        alt.Tooltip("standing:Q", title="images right"),
        alt.Tooltip("lost:Q", title="lost in this step"),
    ]
    bars = alt.Chart(rows).mark_bar(color=CLASSIFIER_COLOURS["mixed"], height=14).encode(x=x, y=y, tooltip=tooltip)
    labels = text_layer(rows, align="left", dx=6).encode(x=x, y=y, text="label:N")
    size = {"wide": 560, "narrow": 215}[layout]
    chart = alt.layer(bars, labels).properties(width=size, height=alt.Step(26))
    return chart.properties(description=survival_description(results))


def survival_description(results: RunResults) -> str:
    """The chart in words."""
    steps = [f"{step.step} {step.standing.correct}" for step in results.survival]
    return f"Images of {results.n_images} that the mixture has right after each step: {', '.join(steps)}."

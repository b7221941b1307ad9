"""Draw the effect of M on the margin: large margins grow, and small ones do not.

uv run python examples/transformation.py     # writes transformation.svg
"""

import altair as alt
import torch

import mixednuts_dist as mn

leads = torch.linspace(0, 6, 61, dtype=torch.float64)  # the first logit minus the second, among ten
logits = torch.zeros(len(leads), 10, dtype=torch.float64)
logits[:, 0], logits[:, 1] = 3 + leads / 2, 3 - leads / 2

rows = [
    {"lead": float(lead), "margin": float(margin), "power": f"p = {power:g}"}
    for power in (1.0, 2.0, 4.0)
    for lead, margin in zip(
        leads,
        mn.top2_margin(mn.LogitTransform(scale=1.0, power=power, bias=-0.5)(logits).softmax(dim=1)),
        strict=True,
    )
]
chart = alt.Chart(alt.Data(values=rows), width=360, height=220, title="s = 1, c = -0.5, GELU").mark_line()
chart = chart.encode(
    x=alt.X("lead:Q", title="lead of the first logit"),
    y=alt.Y("margin:Q", title="margin of the probabilities after M"),
    color="power:N",
)
chart.save("transformation.svg")

"""Draw the margins of the robust classifier on attacked and correct images, and on clean and wrong ones.

    uv run python examples/margins.py     # writes margins.svg

If a margin threshold lies between the two groups, the standard classifier decides the clean and wrong images. M moves
the groups apart. The axis is log10(1 - margin), which resolves margins near 1.
"""

import altair as alt
import torch

import mixednuts_dist as mn

rob = mn.load_classifier("demo:rob", "rob")
images, labels = mn.open_dataset("digits").read(0, 300)
threat, transform = mn.ThreatModel("Linf", 0.15), mn.LogitTransform(scale=2.9, power=10.0, bias=0.4)

worst = mn.minimum_margin_attack(rob, images[:80], labels[:80], threat=threat, n_iter=20, n_target_classes=3)
with torch.no_grad():
    clean = rob(images)
groups = {
    "attacked and correct": worst.logits[~worst.broken],
    "clean and wrong": clean[clean.argmax(dim=1) != labels],
}
rows = [
    {"group": name, "form": form, "log": float((1 - margin).clamp_min(1e-15).log10())}
    for name, logits in groups.items()
    for form, seen in (("rob", logits.double()), ("M(rob)", transform(logits.double())))
    for margin in mn.top2_margin(seen.softmax(dim=1))
]
ticks = alt.Chart(alt.Data(values=rows), width=420, height=60).mark_tick(thickness=2, opacity=0.5)
ticks = ticks.encode(
    x=alt.X("log:Q", title="log10(1 - margin)"), y=alt.Y("group:N", title=None), color=alt.Color("group:N", legend=None)
)
ticks.facet(row=alt.Row("form:N", sort=["rob", "M(rob)"], title=None)).save("margins.svg")

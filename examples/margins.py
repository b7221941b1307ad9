"""Why a mixture can work: rob's margins on attacked images that are right, and on clean ones that are wrong.

    uv run python examples/margins.py     # writes margins.svg

A cutoff between the two heaps lets std decide the wrong ones. M moves the heaps apart. The axis is log10(1 - margin):
margins near 1 cannot be told apart otherwise.
"""

import altair as alt
import torch

import mixednuts_dist as mn

rob = mn.load_classifier("demo:rob", "rob")
images, labels = mn.open_dataset("digits").read(0, 300)
threat, transform = mn.ThreatModel("Linf", 0.15), mn.LogitTransform(scale=2.9, power=10.0, bias=0.4)

found = mn.minimum_margin_attack(rob, images[:80], labels[:80], threat=threat, n_iter=20, n_target_classes=3)
with torch.no_grad():
    clean = rob(images)
heaps = {
    "attacked and right": found.logits[~found.broken],
    "clean and wrong": clean[clean.argmax(dim=1) != labels],
}
rows = [
    {"which": name, "behind": behind, "log": float((1 - margin).clamp_min(1e-15).log10())}
    for name, logits in heaps.items()
    for behind, seen in (("rob", logits.double()), ("M(rob)", transform(logits.double())))
    for margin in mn.top2_margin(seen.softmax(dim=1))
]
ticks = alt.Chart(alt.Data(values=rows), width=420, height=60).mark_tick(thickness=2, opacity=0.5)
ticks = ticks.encode(
    x=alt.X("log:Q", title="log10(1 - margin)"), y=alt.Y("which:N", title=None), color=alt.Color("which:N", legend=None)
)
ticks.facet(row=alt.Row("behind:N", sort=["rob", "M(rob)"], title=None)).save("margins.svg")

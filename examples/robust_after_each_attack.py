"""AutoAttack on one classifier: what is left after each attack.

uv run python examples/robust_after_each_attack.py     # writes robust_after_each_attack.svg
"""

import altair as alt

import mixednuts_dist as mn

model = mn.load_classifier("demo:rob", "rob")  # any torch module in eval mode: images in [0, 1] -> logits
images, labels = mn.open_dataset("digits").read(0, 60)
budget = mn.AttackBudget(n_iter=30, n_target_classes=4, n_queries=300)  # AutoAttack's own without it

found = mn.autoattack(model, images, labels, threat=mn.ThreatModel("Linf", 0.15), budget=budget)
print(found)

rows = [{"after": name, "right": right} for name, right, _ in found.table()]
bars = alt.Chart(alt.Data(values=rows), width=360, title="What each attack takes").encode(
    x=alt.X("right:Q", title="images right"), y=alt.Y("after:N", sort=None, title=None)
)
(bars.mark_bar() + bars.mark_text(align="left", dx=3).encode(text="right:Q")).save("robust_after_each_attack.svg")

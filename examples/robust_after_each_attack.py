"""Run AutoAttack on one classifier and draw the number of images that remain robust after each attack.

uv run python examples/robust_after_each_attack.py     # writes robust_after_each_attack.svg
"""

import altair as alt

import mixednuts_dist as mn

model = mn.load_classifier("demo:rob", "rob")  # any torch module in eval mode that maps images in [0, 1] to logits
images, labels = mn.open_dataset("digits").read(0, 60)
budget = mn.AttackBudget(n_iter=30, n_target_classes=4, n_queries=300)  # small; omit it to use AutoAttack's budget

result = mn.autoattack(model, images, labels, threat=mn.ThreatModel("Linf", 0.15), budget=budget)
print(result)

rows = [{"after": name, "robust": n_robust} for name, n_robust, _ in result.table()]
bars = alt.Chart(alt.Data(values=rows), width=360, title="Robust images after each attack").encode(
    x=alt.X("robust:Q", title="images"), y=alt.Y("after:N", sort=None, title=None)
)
(bars.mark_bar() + bars.mark_text(align="left", dx=3).encode(text="robust:Q")).save("robust_after_each_attack.svg")

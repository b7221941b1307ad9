"""Draw accuracy against the radius for the standard, the robust and the mixed classifier.

uv run python examples/radii.py     # writes radii.svg
"""

import altair as alt

import mixednuts_dist as mn

std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:rob", "rob")
mixed = mn.MixedClassifier(
    std, rob, mn.LogitTransform(scale=2.9064, power=10.0, bias=0.4), alpha=0.5000001
)  # just above 1/2
images, labels = mn.open_dataset("digits").read(0, 60)
options = {"attacks": ("apgd-ce", "apgd-t"), "budget": mn.AttackBudget(n_iter=20, n_target_classes=3)}

rows = []
for name, model in {"std": std, "rob": rob, "mixed": mixed}.items():
    for eps in (0.02, 0.05, 0.1, 0.15, 0.2):
        found = mn.autoattack(model, images, labels, threat=mn.ThreatModel("Linf", eps), **options)
        rows.append({"which": name, "radius": eps, "robust": 100 * found.robust_accuracy})
    rows.append({"which": name, "radius": 0.0, "robust": 100 * found.clean_accuracy})

lines = alt.Chart(alt.Data(values=rows), width=360, height=240).mark_line(point=True)
lines.encode(
    x="radius:Q", y=alt.Y("robust:Q", title="robust, %"), color=alt.Color("which:N", sort=["std", "rob", "mixed"])
).save("radii.svg")

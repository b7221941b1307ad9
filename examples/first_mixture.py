"""Two classifiers and images in, a mixed classifier out: the trade-off of clean against robust accuracy.

    uv run python examples/first_mixture.py     # writes first_mixture.svg

The parameters of every beta come from one attack on rob; the curve is what they are predicted to reach, the points what
was measured.
"""

from pathlib import Path

import mixednuts_dist as mn

std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:rob", "rob")
images, labels = mn.open_dataset("digits").read(0, 60)
few = {"n_iter": 20, "n_target_classes": 3}  # leave it out for numbers that you report

mixed = mn.mix(std, rob, images, labels, threat=mn.ThreatModel("Linf", 0.15), beta=0.95, attack=few, evaluate=few)
print(mixed.report)
Path("first_mixture.svg").write_text(mixed.report.curve)

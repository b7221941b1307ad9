"""Two classifiers and images in, a mixed classifier out: the trade-off of clean against robust accuracy.

    uv run python examples/first_mixture.py     # writes first_mixture.svg

The parameters of every beta come from one attack on rob; the curve is what they are predicted to reach, the points what
was measured.
"""

from pathlib import Path

import mixednuts_dist as mn

std, rob = mn.load_classifier("demo:std"), mn.load_classifier("demo:rob")
images, labels = mn.open_dataset("digits").read(0, 60)
threat = mn.ThreatModel("Linf", 0.15)
few = {"n_iter": 20, "n_target_classes": 3}  # drop these and the preset for numbers that you report

result = mn.mix(std, rob, images, labels, threat=threat, beta=0.95, preset="fast", attack=few, evaluate=few)
print(result.report)
Path("first_mixture.svg").write_text(result.report.curve)

"""Mix two classifiers and draw the trade-off between clean and robust accuracy.

    uv run python examples/first_mixture.py     # writes first_mixture.svg

The parameters for every beta come from one attack on the robust classifier. The curve shows predicted accuracies, and
the marks show accuracies measured under attack.
"""

from pathlib import Path

import mixednuts_dist as mn

std, rob = mn.load_classifier("demo:std"), mn.load_classifier("demo:rob")
images, labels = mn.open_dataset("digits").read(0, 60)
threat = mn.ThreatModel("Linf", 0.15)
few = {"n_iter": 20, "n_target_classes": 3}  # remove these and the preset for results that you publish

result = mn.mix(std, rob, images, labels, threat=threat, beta=0.95, preset="fast", attack=few, evaluate=few)
print(result.report)
Path("first_mixture.svg").write_text(result.report.curve)

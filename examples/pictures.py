"""Draw clean images, adversarial images, and the difference between them.

uv run python examples/pictures.py     # writes pictures.png
"""

import torch
from PIL import Image

import mixednuts_dist as mn

model = mn.load_classifier("demo:rob", "rob")
images, labels = mn.open_dataset("digits").read(0, 40)
budget = mn.AttackBudget(n_iter=30, n_target_classes=4)

found = mn.autoattack(model, images, labels, threat=mn.ThreatModel("Linf", 0.15), attacks=("apgd-ce",), budget=budget)
fooled = (found.clean & ~found.robust).nonzero().squeeze(1)[:8]
classes = found.logits.argmax(dim=1)
for i in fooled.tolist():
    print(f"image {i}: {int(labels[i])} is classified as {int(classes[i])}")

clean, attacked = images[fooled], found.x_adv[fooled]
rows = [torch.cat(list(part.squeeze(1)), dim=1) for part in (clean, attacked, 0.5 + (attacked - clean) / 0.3)]
sheet = Image.fromarray((255 * torch.cat(rows, dim=0)).round().clamp(0, 255).byte().numpy())
sheet.resize((8 * sheet.width, 8 * sheet.height), Image.Resampling.NEAREST).save("pictures.png")

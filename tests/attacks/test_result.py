"""AttackResult: counts after each attack, in a terminal and in a notebook."""

import torch

import mixednuts_dist as mn


def test_result_counts_images_after_each_attack() -> None:
    """Three correct images of four; the first attack leaves two, the second one."""
    steps = {"apgd-ce": [True, True, False, False], "<b>toy</b>": [True, False, False, False]}
    survived = {name: torch.tensor(left) for name, left in steps.items()}
    found = mn.AttackResult(
        clean=torch.tensor([True, True, True, False]), broken=~survived["<b>toy</b>"], survived=survived,
        x_adv=torch.zeros(4, 1, 2, 2), logits=torch.zeros(4, 3), log_one_minus_margin=torch.zeros(4),
        n_forward=1200, n_backward=30,
        unconfirmed=torch.zeros(4, dtype=torch.bool), decided=torch.tensor([True, True, True, False]),
    )  # fmt: skip
    assert repr(found).splitlines() == [
        "clean   75.0%: 3 of 4 images",
        "robust  50.0% after apgd-ce, 25.0% after <b>toy</b>: 1 image; 1 undecided",
        "passes  1,200 forward, 30 backward",
    ]
    assert found.table() == [("clean", 3, 75.0), ("apgd-ce", 2, 50.0), ("<b>toy</b>", 1, 25.0)]
    html = found._repr_html_()
    assert html.count("<tr>") == 4 and "<td>25.0%</td>" in html
    assert "&lt;b&gt;toy" in html and "<b>" not in html


def test_result_holds_clean_outcomes_and_attacked_images() -> None:
    """A robust image has the attacked image with the smallest margin as `x_adv`."""
    std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:rob", "rob")
    mixed = mn.MixedClassifier(std, rob, mn.LogitTransform(1.0, 2.5, -0.714), alpha=0.9)
    images, labels = mn.open_dataset("digits").read(0, 12)
    labels[:2] = (labels[:2] + 1) % 10
    options = {"threat": mn.ThreatModel("Linf", 0.15), "attacks": ["apgd-ce"], "budget": mn.AttackBudget(n_iter=3)}
    for model in (rob, mixed):
        found = mn.autoattack(model, images, labels, **options)
        assert torch.equal(found.clean, model(images).argmax(dim=1) == labels)
        assert not found.clean[:2].any() and not (found.robust & ~found.clean).any()
        assert bool((found.x_adv != images).flatten(1).any(dim=1)[found.robust].all())

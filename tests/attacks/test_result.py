"""AttackResult: counts after each attack, in a terminal and in a notebook."""

import torch

import mixednuts_dist as mn


def outcome() -> mn.AttackResult:
    """Three right images of four; the first attack leaves two, the second one."""
    steps = {"apgd-ce": [True, True, False, False], "square": [True, False, False, False]}
    survived = {name: torch.tensor(left) for name, left in steps.items()}
    return mn.AttackResult(
        clean=torch.tensor([True, True, True, False]), broken=~survived["square"], survived=survived,
        x_adv=torch.zeros(4, 1, 2, 2), logits=torch.zeros(4, 3), log_one_minus_margin=torch.zeros(4),
        n_forward=1200, n_backward=30,
        unconfirmed=torch.zeros(4, dtype=torch.bool), decided=torch.tensor([True, True, True, False]),
    )  # fmt: skip


def test_its_three_lines_are_clean_robust_and_passes() -> None:
    assert repr(outcome()).splitlines() == [
        "clean   75.0%: 3 of 4 images",
        "robust  50.0% after apgd-ce, 25.0% after square: 1 image; 1 undecided",
        "passes  1,200 forward, 30 backward",
    ]


def test_its_table_has_a_row_a_step_also_as_html() -> None:
    assert outcome().table() == [("clean", 3, 75.0), ("apgd-ce", 2, 50.0), ("square", 1, 25.0)]
    html = outcome()._repr_html_()
    assert html.count("<tr>") == 4 and "<td>25.0%</td>" in html


def test_result_html_escapes_attack_names() -> None:
    found = outcome()
    found.survived["<b>toy</b>"] = found.robust
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;toy" in found._repr_html_()


def test_robust_images_have_the_attacked_image_as_x_adv() -> None:
    rob = mn.load_classifier("demo:rob", "rob")
    images, labels = mn.open_dataset("digits").read(0, 12)
    threat = mn.ThreatModel("Linf", 0.15)
    found = mn.autoattack(rob, images, labels, threat=threat, attacks=["apgd-ce"], budget=mn.AttackBudget(n_iter=3))
    assert torch.equal(found.robust, found.survived["apgd-ce"])
    assert torch.equal(found.margin < 0, found.broken)
    assert bool((found.x_adv != images).flatten(1).any(dim=1)[found.robust].all())


def test_an_attack_says_which_images_were_right_before_it() -> None:
    std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:rob", "rob")
    mixed = mn.MixedClassifier(std, rob, mn.LogitTransform(1.0, 2.5, -0.714), alpha=0.9)
    images, labels = mn.open_dataset("digits").read(0, 12)
    labels[:2] = (labels[:2] + 1) % 10
    budget = mn.AttackBudget(n_iter=3, n_target_classes=1)
    threat = mn.ThreatModel("Linf", 0.15)
    found = mn.autoattack(mixed, images, labels, threat=threat, attacks=["apgd-ce"], budget=budget)
    assert torch.equal(found.clean, mixed(images).argmax(dim=1) == labels)
    assert not found.clean[:2].any() and not (found.robust & ~found.clean).any()

"""Adaptive AutoAttack on a mixed classifier: its plan, records and cached images."""

from collections.abc import Callable

import pytest
import torch
from pyautoattack import AutoAttack

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.attack import ImageSummary, Run, Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.plans import ensemble_plan, margin_plan
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.classifier import MixedClassifier
from tests.helpers.small_nets import SHAPE, images, mixture

THREAT = ThreatModel("Linf", 0.05)
QUICK = AttackBudget(n_iter=20, n_target_classes=3, n_queries=150)


Pair = tuple[MixedClassifier, torch.Tensor, torch.Tensor]


@pytest.fixture
def pair() -> Pair:
    mixed, x = mixture(), images(16, SHAPE)
    return mixed, x, mixed(x).argmax(dim=1)


@pytest.mark.parametrize("mode", ["transfer", "bypass"])
def test_an_image_once_misclassified_stays_so_in_the_record(pair: Pair, mode: str) -> None:
    mixed, x, y = pair
    state = torch.random.get_rng_state()
    found = autoattack(mixed, x, y, threat=THREAT, mode=mode, budget=QUICK)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    with torch.no_grad():
        assert torch.equal(found.robust, mixed(found.x_adv).argmax(dim=1) == y)
    assert list(found.survived) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    left = torch.ones_like(found.robust)
    for survived in found.survived.values():
        assert not bool((survived & ~left).any()), "a broken image is robust again"
        left = survived
    assert torch.equal(left, found.robust)
    assert 0 < int(found.robust.sum()) < len(x)


def test_cached_images_only_strengthen_the_adversary(pair: Pair) -> None:
    mixed, x, y = pair
    strong = autoattack(mixed, x, y, threat=THREAT, attacks=("apgd-ce", "apgd-t"))
    cached = autoattack(mixed, x, y, threat=THREAT, attacks=(), cached_BCHW=strong.x_adv)
    assert list(cached.survived) == ["warm-start"]
    assert torch.equal(cached.robust, strong.robust)
    useless = autoattack(mixed, x, y, threat=THREAT, attacks=(), cached_BCHW=x)
    assert bool(useless.robust.all())


def test_square_and_fab_use_low_precision_only_after_apgd() -> None:
    plan = ensemble_plan(Setting(THREAT, QUICK, 10, low_precision=True), ["square", "apgd-ce", "fab-t"])
    assert [run.float32 for run in plan if run.attack == "square"] == [True]
    assert all(run.wanted is None for run in plan if run.attack == "square")
    assert [run.float32 for run in plan if run.attack == "fab-t"] == [False] * 3 + [True] * 3
    in_tf32 = ensemble_plan(Setting(THREAT, QUICK, 10, low_precision=True, tf32=True), ["apgd-ce", "fab-t"])
    assert [run.float32 for run in in_tf32 if run.attack == "fab-t"] == [True] * 3


@pytest.mark.parametrize("plan_of", [margin_plan, lambda setting: ensemble_plan(setting, ["apgd-ce", "apgd-t"])])
def test_borderline_images_repeat_apgd_in_float32(plan_of: Callable[[Setting], list[Run]]) -> None:
    plan = plan_of(Setting(THREAT, QUICK, 10, low_precision=True))
    searched = [run for run in plan if run.name.startswith("apgd")]
    low, exact = searched[: len(searched) // 2], searched[len(searched) // 2 :]
    assert [run.float32 for run in searched] == [False] * len(low) + [True] * len(exact)
    starts, again = ([(run.name, run.restart, run.target) for run in runs] for runs in (low, exact))
    assert starts == again
    assert len({run.block for run in exact}) == 1
    # (margin, clean margin, margin of the repeated run) -> whether it is repeated
    cases = {
        (0.045, 1.0, 0.045): True, (0.055, 1.0, 0.055): False, (0.045, 1.0, 0.055): False,
        (0.0045, 0.05, 0.0045): True, (0.0055, 0.05, 0.0055): False, (-0.01, 1.0, -0.01): False,
    }  # fmt: skip
    for run in exact:
        assert run.wanted is not None
        for (margin, clean, repeated), expected in cases.items():
            assert run.wanted(ImageSummary(margin, clean, 0.0, repeated)) == expected


@pytest.mark.parametrize(("alpha", "temperature", "expected"), [
    (0.5005, 0.0, [True, False, False]),  # half of the rest if `std` votes against the label
    (0.505, 0.0, [True, True, False]),
    (0.7, 0.0, [True, True, False]),  # a twentieth of the clean margin
    (0.5005, 0.5, [True, True, False]),
])  # fmt: skip
def test_borderline_depends_on_alpha_and_temperature(alpha: float, temperature: float, expected: list[bool]) -> None:
    mixed = mixture()
    model = MixedClassifier(mixed.std, mixed.rob, mixed.transform, alpha, temperature=temperature)
    setting = Setting(THREAT, QUICK, 10, model=model)
    images = [ImageSummary(margin, 1.0, 0.0, margin) for margin in (0.0004, 0.004, 0.051)]
    assert [setting.is_borderline(image) for image in images] == expected


def test_unknown_attacks_and_modes_are_named(pair: Pair) -> None:
    with pytest.raises(InvalidInputError, match=r"attack 'fabt' is not known.*fab.*Valid names: apgd-ce, apgd-t"):
        autoattack(*pair, threat=THREAT, attacks=("fabt",))
    with pytest.raises(InvalidInputError, match=r"'transfre'.*transfer, bypass"):
        autoattack(*pair, threat=THREAT, mode="transfre")


@pytest.mark.slow
def test_transfer_is_as_strong_as_pyautoattack_on_the_bypass(pair: Pair) -> None:
    mixed, x, y = pair
    published = AutoAttack(
        mixed.as_bypass(), norm="Linf", eps=THREAT.eps, attacks=["apgd-ce", "apgd-t"], version="custom", seed=0,
        device="cpu",
    )  # fmt: skip
    x_adv = published.run_standard_evaluation(x, y, batch_size=16)[0]
    theirs = int((mixed(x_adv).argmax(dim=1) == y).sum())
    ours = autoattack(mixed, x, y, threat=THREAT, attacks=("apgd-ce", "apgd-t"))
    assert int(ours.robust.sum()) <= theirs + 1

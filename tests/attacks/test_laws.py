"""The laws of every registered attack."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.attack import Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.entry import checked_labels
from mixednuts_dist.attacks.plans import ensemble_plan, passes_of
from mixednuts_dist.attacks.result import AttackResult
from mixednuts_dist.config.register import ATTACKS
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.margins import signed_margin
from mixednuts_dist.norms.ball import ball_of
from tests.helpers.small_nets import L1, L2, LINF, QUICK, SHAPE, ShortOfMemory, images, mixture, small_net

ALL = ATTACKS.names()
ON_ONE = [name for name, entry in ATTACKS.entries().items() if not entry.facts.get("mixtures_only")]
every_attack = pytest.mark.parametrize("attack", ALL)


@pytest.fixture(scope="module")
def pair() -> tuple[MixedClassifier, Tensor, Tensor]:
    mixed, x = mixture(), images(20, SHAPE)
    with torch.no_grad():
        return mixed, x, mixed(x).argmax(dim=1)


def attacked(pair: tuple[MixedClassifier, Tensor, Tensor], attack: str, order: list[int], **options) -> AttackResult:
    mixed, x, y = pair
    settings = {"threat": LINF, "budget": QUICK, "batch_size": 8, "precision": "fp32", **options}
    return autoattack(mixed, x[order], y[order], attacks=(attack,), sample_ids=order, **settings)


@every_attack
@pytest.mark.parametrize("threat", [LINF, L2, L1], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adversarial_examples_lie_in_the_ball_and_are_verified(
    pair, attack: str, threat: ThreatModel, precision
) -> None:
    mixed, x, y = pair
    stop = threat != L2  # in L2, attacks minimize the margin to the end
    mode = "bypass" if threat == L1 else "transfer"
    found = attacked(pair, attack, [*range(20)], threat=threat, precision=precision, stop_when_broken=stop, mode=mode)
    assert float(ball_of(threat).length(found.x_adv - x).max()) <= threat.eps * (1 + 1e-5)
    assert 0 <= float(found.x_adv.min()) <= float(found.x_adv.max()) <= 1
    with torch.no_grad():
        logits = mixed(found.x_adv)
    assert torch.equal(found.robust, logits.argmax(dim=1) == y)
    assert torch.equal(found.survived[attack], found.robust)
    assert torch.allclose(found.logits, logits, atol=1e-5)
    assert torch.allclose(found.margin, signed_margin(found.logits.double().softmax(dim=1), y), atol=1e-9)
    assert torch.equal(found.margin < 0, found.broken)
    assert bool((found.margin <= autoattack(mixed, x, y, threat=threat, attacks=(), batch_size=8).margin).all())
    assert bool((~found.robust).any()), "an attack that breaks nothing here shows nothing"


@every_attack
@pytest.mark.parametrize("threat", [LINF, L1], ids=str)
def test_results_are_the_same_bits_in_any_order_and_partition(pair, attack: str, threat: ThreatModel) -> None:
    whole = attacked(pair, attack, [*range(20)], threat=threat)
    for order in ([*range(19, -1, -1)], [4, 17, 9], [2]):
        part = attacked(pair, attack, order, threat=threat)
        assert torch.equal(part.x_adv, whole.x_adv[order])
        assert torch.equal(part.logits, whole.logits[order])


@every_attack
@pytest.mark.parametrize("threat", [LINF, L1], ids=str)
def test_memory_that_ends_loses_nothing(pair, attack: str, threat: ThreatModel) -> None:
    _, x, y = pair
    expected = attacked(pair, attack, [*range(20)], threat=threat)
    short = mixture()
    short.rob = ShortOfMemory(short.rob, 5)
    found = attacked((short, x, y), attack, [*range(20)], threat=threat)
    assert short.rob.refused > 0
    assert torch.equal(found.robust, expected.robust)


@pytest.mark.parametrize("attack", ON_ONE)
def test_every_pass_of_a_real_image_is_counted(attack: str) -> None:
    """With one row per pass, no row is padding. The checks before the first pass do not count."""
    net, x = small_net(4, (1, 6, 9)), images(5, (1, 6, 9))
    seen = {"forward": 0, "backward": 0}

    def counting(x: Tensor) -> Tensor:
        seen["forward"] += len(x)
        logits: Tensor = net(x)
        if logits.requires_grad:
            logits.register_hook(lambda grad: seen.__setitem__("backward", seen["backward"] + len(grad)))
        return logits

    y, threat = net(x).argmax(dim=1), ThreatModel("Linf", 0.1)
    checked_labels(counting, x, y, threat, (attack,))
    checks = dict(seen)
    found = autoattack(counting, x, y, threat=threat, attacks=(attack,), budget=QUICK, batch_size=1)
    passed = {kind: seen[kind] - 2 * checks[kind] for kind in seen}
    assert (found.n_forward, found.n_backward) == (passed["forward"], passed["backward"])


@pytest.mark.parametrize("attack", ON_ONE)
def test_an_image_that_survives_costs_what_the_plan_says(attack: str) -> None:
    """Verifications of the clean image, of each run's end and of the result come on top."""
    net, x = small_net(10, SHAPE), images(4, SHAPE)
    y = net(x).argmax(dim=1)
    found = autoattack(net, x, y, threat=ThreatModel("Linf", 1e-6), attacks=(attack,), budget=QUICK, precision="fp32")
    assert bool(found.robust.all())
    forward, backward = passes_of(attack, QUICK, 10)
    assert found.n_backward <= 4 * backward
    assert found.n_backward >= 4 * backward * 0.9
    assert 4 * forward * 0.9 <= found.n_forward <= 4 * (forward + 2 + QUICK.n_targets(10))


@pytest.mark.parametrize("attack", ON_ONE)
@pytest.mark.parametrize("n_classes", [2, 3, 4])
def test_few_classes_and_images_that_are_not_square(attack: str, n_classes: int) -> None:
    net, x = small_net(n_classes, (1, 6, 9)), images(5, (1, 6, 9))
    y = net(x).argmax(dim=1)
    found = autoattack(net, x, y, threat=ThreatModel("Linf", 0.4), attacks=(attack,), budget=QUICK)
    assert bool((~found.robust).any())
    assert torch.equal(found.robust, net(found.x_adv).argmax(dim=1) == y)


@pytest.mark.filterwarnings("ignore:the gradient of the model is zero")
@pytest.mark.parametrize("attack", ON_ONE)
def test_a_constant_classifier_is_not_broken_and_nothing_is_nan(attack: str) -> None:
    def constant(x: Tensor) -> Tensor:
        return torch.tensor([[2.0, 1.0, 0.0, -1.0]]) + 0 * x.flatten(1).sum(dim=1, keepdim=True)

    x = images(3, (1, 6, 9))
    found = autoattack(constant, x, torch.zeros(3).long(), threat=LINF, attacks=(attack,), budget=QUICK)
    assert bool(found.robust.all())
    assert bool(torch.isfinite(found.x_adv).all())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_renamed_attack_has_the_same_plan_and_results(pair, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of random numbers use the name in the run, so the starts are equal."""
    mixed, x, y = pair
    names = {name: f"x-{name}" for name in ("apgd-ce", "apgd-t", "square")}
    for name, other in names.items():
        facts = ATTACKS.entries()[name].facts
        monkeypatch.setitem(ATTACKS._made, other, ATTACKS.get(name))
        monkeypatch.setitem(ATTACKS._added, other, replace(ATTACKS.entries()[name], name=other, facts=facts))
    setting = Setting(LINF, QUICK, 10, model=mixed, low_precision=precision == "bf16")
    plans = [ensemble_plan(setting, named) for named in (names.keys(), names.values())]
    assert [names[run.attack] for run in plans[0]] == [run.attack for run in plans[1]]
    for a, b in zip(*plans, strict=True):
        assert (a.name, a.float32, a.wanted is None) == (b.name, b.float32, b.wanted is None)
    options = {"threat": LINF, "budget": QUICK, "batch_size": 8, "precision": precision}
    one, other = (autoattack(mixed, x, y, attacks=[*named], **options) for named in (names, names.values()))
    assert torch.equal(one.x_adv, other.x_adv)
    assert (one.n_forward, one.n_backward) == (other.n_forward, other.n_backward)
    assert all(torch.equal(one.survived[name], other.survived[names[name]]) for name in names)


@pytest.mark.parametrize("before", [(), ("apgd-ce",)], ids=["alone", "after APGD"])
@pytest.mark.parametrize("attack", ["fab-t", "square"])
def test_rounding_to_bfloat16_loses_no_image(attack: str, before: tuple[str, ...], victim) -> None:
    """After APGD, borderline images are attacked again in float32; alone, every image runs in float32."""
    model, x, y = victim(n=24)
    budget = AttackBudget(n_iter=10, n_target_classes=2, n_queries=60, joint_starts=0)
    options = {"threat": ThreatModel("Linf", 0.02), "attacks": (*before, attack), "budget": budget}
    exact = autoattack(model, x, y, precision="fp32", **options)
    rounded = autoattack(model, x, y, precision="bf16", **options)
    assert 0 < int(exact.robust.sum()) < len(x)
    assert not bool((rounded.robust & ~exact.robust).any())
    assert not before or rounded.n_forward > exact.n_forward

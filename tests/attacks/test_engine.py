"""The engine's promises: nothing is lost when memory ends, beliefs are not claims, an image's result is its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor, nn

from mixednuts_dist.attacks.apgd import ApgdSchedule
from mixednuts_dist.attacks.engine import Engine, EngineSettings, apgd_plan, begin
from mixednuts_dist.attacks.minimum_margin import MinimumMarginResult, minimum_margin_attack
from mixednuts_dist.attacks.projections import random_start
from mixednuts_dist.attacks.slots import Tracks
from mixednuts_dist.attacks.victim import Victim
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.threat import ThreatModel

LINF = ThreatModel("Linf", 0.015)
REAL = Path(__file__).parents[3] / "shared" / "real"
needs_real = pytest.mark.skipif(not (REAL / "zoo.py").is_file(), reason="the real classifiers are not at hand")


def run_engine(
    victim: Victim, x: Tensor, y: Tensor, *, n_slots: int = 64, n_iter: int = 12, make: type[Engine] = Engine
) -> Tracks:
    """APGD-CE and two targets on all images."""
    tracks, targets_NK = begin(victim, x, y, n_slots)
    settings = EngineSettings(LINF, ApgdSchedule(n_iter), n_slots=n_slots)
    plan = apgd_plan(("apgd-ce", "apgd-t"), 2, targets_NK.shape[1])
    make(victim, x, y, range(len(x)), plan, settings, targets_NK, tracks).run(torch.arange(len(x)))
    return tracks


class ShortOfMemory(nn.Module):
    """A network on a device with room for `room` images."""

    def __init__(self, network: nn.Module, room: int) -> None:
        super().__init__()
        self.network, self.room, self.refused = network, room, 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no room for {len(x)} images")
        logits: Tensor = self.network(x)
        return logits


@pytest.mark.parametrize("room", [1, 5, 9])
def test_running_out_of_memory_loses_nothing(victim, room: int) -> None:
    model, x, y = victim(n=30)
    expected = run_engine(Victim.of(model), x, y)
    short = ShortOfMemory(model, room)
    found = run_engine(Victim.of(short), x, y)
    assert short.refused > 0
    assert torch.equal(found.broken, expected.broken)
    assert torch.allclose(found.margin(), expected.margin(), atol=1e-4 if room < 4 else 1e-9)
    assert found.n_backward == expected.n_backward
    assert 0 < int(found.broken.sum()) < len(x)


def test_memory_that_ends_in_the_middle_of_an_attack(victim) -> None:
    """Slots that are set aside go on from their iteration: their path is the one without a break."""
    model, x, y = victim(n=20)
    short = ShortOfMemory(model, 20)
    calls = 0

    def shrinking(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            short.room = 6
        return short(x)

    found = run_engine(Victim.of(shrinking), x, y)
    expected = run_engine(Victim.of(model), x, y)
    assert short.refused > 0
    assert torch.equal(found.x_adv, expected.x_adv)
    assert found.n_backward == expected.n_backward


def test_where_no_image_fits_the_error_gets_through(victim) -> None:
    model, x, y = victim(n=3)
    with pytest.raises(torch.OutOfMemoryError, match="no room for 1 images"):
        run_engine(Victim.of(ShortOfMemory(model, 0)), x, y)


def believing(model: nn.Module, belief: Callable[[Tensor], Tensor]) -> Victim:
    """A victim whose climb reports `belief(logits)` in place of what the judge says."""

    def climb_and_judge(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        return logits, belief(logits.detach())

    return replace(Victim.of(model), climb_and_judge=climb_and_judge, exact=False)


def test_an_image_that_only_seems_broken_goes_on(victim) -> None:
    """A climb that sees success everywhere breaks nothing that the judge does not see, and stops nobody early."""
    model, x, y = victim(n=16)
    found = run_engine(believing(model, torch.neg), x, y)
    with torch.no_grad():
        assert torch.equal(found.broken, model(found.x_adv).argmax(dim=1) != y)
    standing = int((~found.broken).sum())
    assert standing > 0
    assert found.n_backward >= standing * 3 * 13


def test_an_image_that_never_seems_broken_is_judged_as_its_phases_end(victim) -> None:
    model, x, y = victim(n=60)
    label = y.mode().values
    x, y = x[y == label], y[y == label]
    calm = torch.nn.functional.one_hot(label, 10) * 50.0
    found = run_engine(believing(model, lambda logits: logits + calm), x, y)
    with torch.no_grad():
        assert torch.equal(found.broken, model(found.x_adv).argmax(dim=1) != y)
    assert bool(found.broken.any())
    assert found.n_backward >= len(x) * 13, "nobody leaves before a phase is over"


class LateEngine(Engine):
    """Hears of success one round late, as on an accelerator."""

    heard: tuple[Tensor, Tensor] | None = None

    def _suspects(self) -> Tensor:
        slots = self._slots
        before, self.heard = self.heard, (slots.example, slots.wrong_found.clone())
        if before is None:
            return torch.zeros(len(slots), dtype=torch.bool)
        return torch.isin(slots.example, before[0][before[1]])


def test_hearing_late_of_a_success_changes_no_result(victim) -> None:
    model, x, y = victim(n=30)
    late = run_engine(Victim.of(model), x, y, n_slots=8, make=LateEngine)
    prompt = run_engine(Victim.of(model), x, y, n_slots=8)
    assert torch.equal(late.broken, prompt.broken)
    assert torch.equal(late.x_adv, prompt.x_adv)
    assert late.n_backward > prompt.n_backward


def independent_of_the_batch(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel) -> None:
    options = {"threat": threat, "n_iter": 20, "n_target_classes": 2}
    whole, few, alone = (minimum_margin_attack(model, x, y, batch_size=size, **options) for size in (64, 7, 1))
    for other in (few, alone):
        assert torch.equal(other.broken, whole.broken)
        assert torch.allclose(other.margin, whole.margin, rtol=0, atol=1e-5)
    assert 0 < int(whole.broken.sum()) < len(x)


@pytest.mark.parametrize("name", ["demo:std", "demo:rob"])
def test_batches_of_1_7_and_64_give_the_same_margins(name: str) -> None:
    x, y = open_dataset("digits").read(0, 20)
    eps = {"demo:std": 0.03, "demo:rob": 0.15}[name]
    independent_of_the_batch(load_classifier(name, name), x, y, ThreatModel("Linf", eps))


@needs_real
@pytest.mark.parametrize(("name", "eps"), [("rob_c10_resnet4b", 2), ("rob_c10_cnn_wide_kw", 4)])
def test_batches_of_1_7_and_64_give_the_same_margins_on_cifar(name: str, eps: int) -> None:
    x, y = open_dataset(f"npz:{REAL / 'cifar10_test_first1000.npz'}").read(100, 112)
    model = load_classifier(f"py:{REAL / 'zoo.py'}:{name}", "rob")
    independent_of_the_batch(model, x, y, ThreatModel("Linf", eps / 255))


def plain_minimum_margins(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, n_iter: int) -> Tensor:
    """The published runs, one after the other, on all images to the end; the smallest margin of each on the way."""
    smallest = torch.full((len(x),), -torch.inf, dtype=torch.float64)

    def watched(images: Tensor) -> Tensor:
        logits: Tensor = model(images)
        smallest.copy_(smallest.maximum(log_one_minus_signed_margin(logits.detach(), y)))
        return logits

    options = {"n_iter": n_iter, "norm": threat.norm, "eps": threat.eps, "seed": 0, "device": x.device}
    order = watched(x).argsort(dim=1)
    for name, rank in (("apgd-ce", 0), ("apgd-t/2", 2), ("apgd-t/3", 3)):
        attack = APGDAttack_targeted(watched, **options) if rank else APGDAttack(watched, loss="ce", **options)
        attack.y_target = order[:, -rank]
        attack.init_hyperparam(x)
        attack.attack_single_run(x, y, x_init=random_start(x, [(0, name, 0, i) for i in range(len(x))], threat))
    return -torch.expm1(smallest)


def as_small_as_the_plain_loop(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel) -> MinimumMarginResult:
    found = minimum_margin_attack(
        model, x, y, threat=threat, n_iter=20, n_target_classes=2, stop_when_broken=False, border_restarts=0
    )
    reference = plain_minimum_margins(model, x, y, threat, 20)
    assert float(found.margin.mean()) <= float(reference.mean()) + 1e-4
    assert torch.allclose(found.margin, reference, rtol=0, atol=1e-3)
    return found


@pytest.mark.parametrize("threat", [LINF, ThreatModel("L2", 0.15)], ids=str)
def test_margins_equal_those_of_a_plain_loop(victim, threat: ThreatModel) -> None:
    model, x, y = victim(n=16)
    found = as_small_as_the_plain_loop(model, x, y, threat)
    assert 0 < int(found.broken.sum()) < len(x)


@needs_real
def test_margins_on_cifar_are_not_above_those_of_a_plain_loop() -> None:
    x, y = open_dataset(f"npz:{REAL / 'cifar10_test_first1000.npz'}").read(0, 24)
    model = load_classifier(f"py:{REAL / 'zoo.py'}:rob_c10_resnet4b", "rob")
    right = model(x).argmax(dim=1) == y
    as_small_as_the_plain_loop(model, x[right], y[right], ThreatModel("Linf", 2 / 255))

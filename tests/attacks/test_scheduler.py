"""The promises of continuous batching.

Nothing is lost when memory runs out, only verified points count, and an image's result does not depend on the others.
"""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor, nn

from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.adaptive import minimum_margin_attack
from mixednuts_dist.attacks.apgd import apgd_ce, apgd_t
from mixednuts_dist.attacks.attack import Counts, ImageSummary, Run, Setting, SlotState, StartBatch, Stepper, StepResult
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import AttackedModel, GradientModel, Outputs
from mixednuts_dist.attacks.image_record import ImageRecord, Job
from mixednuts_dist.attacks.plans import ensemble_plan
from mixednuts_dist.attacks.result import AttackResult
from mixednuts_dist.attacks.scheduler import Group, Scheduler, ordered_targets
from mixednuts_dist.attacks.verification import Verified
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.norms.ball import ball_of
from tests.helpers.real import CIFAR10, ZOO
from tests.helpers.small_nets import ShortOfMemory
from tests.helpers.stepping import start_keys

LINF = ThreatModel("Linf", 0.015)


def engine_of(
    model: Any, x: Tensor, *, rows: int = 16, budget: AttackBudget | None = None, **options: Any
) -> Scheduler:
    """Return an engine of, by default, APGD-CE and two targets."""
    options = {"threat": LINF, "attacks": ("apgd-ce", "apgd-t"), **options}
    return Scheduler(model, x, budget=budget or AttackBudget(12, 2), shape=BatchShape(rows, fixed=True), **options)


def all_of(x: Tensor, y: Tensor) -> Group:
    return Group(x, y, range(len(x)))


def found_by(model: Any, x: Tensor, y: Tensor, **options: Any) -> AttackResult:
    return engine_of(model, x, **options).run_one(all_of(x, y))


def estimating(
    model: nn.Module, estimate: Callable[[Tensor], Tensor] = lambda logits: logits, rows: list[int] | None = None
) -> AttackedModel:
    """A classifier whose passes report `estimate(logits)` and add their numbers of rows to `rows`."""

    def run(x: Tensor) -> Outputs:
        outputs = Outputs(model(x))
        outputs.model_logits = estimate(outputs.model_logits)
        if rows is not None:
            rows.append(len(x))
        return outputs

    return replace(AttackedModel.of(model), fast=GradientModel(run))


def of_one_class(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images of the most frequent class, their labels, and the class as a one-hot row."""
    label = y.mode().values
    return x[y == label], y[y == label], nn.functional.one_hot(label, 10)


def test_memory_that_ends_in_the_middle_of_an_attack(victim) -> None:
    """Runs without a slot start again, and follow the uninterrupted path."""
    model, x, y = victim(n=20)
    short = ShortOfMemory(model, 6, after=7)
    found, expected = found_by(short, x, y), found_by(model, x, y)
    assert short.refused > 0
    assert torch.allclose(found.x_adv, expected.x_adv, atol=1e-5)
    assert abs(found.n_backward - expected.n_backward) <= 3


def test_out_of_memory_in_verification_shrinks_batches(victim) -> None:
    model, x, y = victim(n=20)
    short = ShortOfMemory(model, 5, after=3)
    found = found_by(replace(AttackedModel.of(model), model=short), x, y)
    assert short.refused > 0
    assert torch.equal(found.broken, found_by(model, x, y).broken)
    assert 0 < int(found.broken.sum()) < len(x)


def test_where_no_image_fits_the_error_gets_through(victim) -> None:
    model, x, y = victim(n=3)
    with pytest.raises(torch.OutOfMemoryError, match="no room for 1 images"):
        found_by(ShortOfMemory(model, 0), x, y)


def test_graphs_of_a_shape_that_did_not_fit_are_given_up(victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs keep the memory of their shape: after it ended, it would not come back."""
    given_up: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: given_up.append(True))
    model, x, y = victim(n=12)
    short = AttackedModel.of(ShortOfMemory(model, 9)).fast
    found = found_by(replace(AttackedModel.of(model), fast=replace(short, compiled=True)), x, y)
    assert given_up
    assert torch.equal(found.broken, found_by(model, x, y).broken)


@pytest.mark.parametrize("seems_broken", [True, False])
def test_only_verified_points_break_an_image(victim, seems_broken: bool) -> None:
    """A success that is not verified ends no run; without any success, the best point of each run is verified."""
    model, x, y = victim(n=60)
    x, y, label = of_one_class(x, y)
    found = found_by(estimating(model, torch.neg if seems_broken else lambda logits: logits + 8.0 * label), x, y)
    with torch.no_grad():
        assert torch.equal(found.broken, model(found.x_adv).argmax(dim=1) != y)
    n_robust = int(found.robust.sum())
    assert 0 < n_robust < len(x)
    assert found.n_backward >= n_robust * 3 * 13 + (0 if seems_broken else (len(x) - n_robust) * 13)


def test_image_that_seems_broken_keeps_its_slot(victim) -> None:
    """It is verified again if its margin is twice as deep, and when its run is over, but not after every step."""
    model, x, y = victim(n=60)
    x, y, label = of_one_class(x, y)
    alarmed = estimating(model, lambda logits: logits - 2.0 * label)
    engine, looks = engine_of(alarmed, x, budget=AttackBudget(40, 2)), 0
    verify = engine.verifier.verify

    def counted(x: Tensor, y: Tensor) -> Verified:
        nonlocal looks
        looks += len(x)
        return verify(x, y)

    engine.verifier.verify = counted  # type: ignore[method-assign]
    found = engine.run_one(all_of(x, y))
    assert not bool(found.broken.all())
    assert looks < 6 * 3 * len(x)


@pytest.mark.parametrize("every", [2, 3, 4])
def test_reading_flags_rarely_changes_neither_result_nor_count(victim, every: int) -> None:
    """As on a GPU, where flags are read every fourth step."""
    model, x, y = victim(n=30)
    for doubted in (AttackedModel.of(model), estimating(model, lambda logits: logits.clamp(max=1))):
        prompt, engine = found_by(doubted, x, y, rows=8), engine_of(doubted, x, rows=8)
        engine.admit(all_of(x, y))
        for batch in engine._batches:
            batch._read_every = every
        found = engine.run_one(all_of(x, y))
        assert torch.equal(found.broken, prompt.broken)
        assert torch.equal(found.x_adv, prompt.x_adv)
        assert (found.n_forward, found.n_backward) == (prompt.n_forward, prompt.n_backward)


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("attacks", [["apgd-t", "fab-t"], ["apgd-ce", "apgd-t"]], ids="-".join)
def test_parallel_runs_equal_sequential_runs(victim, attacks: list[str], stop: bool) -> None:
    """Bits and passes are equal for robust images and for images that one or several runs break."""
    model, x, y = victim(n=40)
    padding = {}

    def found(images: Tensor, *, side_by_side: bool) -> AttackResult:
        def plan(setting: Setting, attacks: Sequence[str]) -> list[Run]:
            runs = ensemble_plan(setting, attacks)
            return runs if side_by_side else [replace(run, block="") for run in runs]

        options = {"attacks": attacks, "budget": AttackBudget(12, 9), "planner": plan, "stop_when_broken": stop}
        rows: list[int] = []
        engine = engine_of(estimating(model, rows=rows), x, rows=32, **options)
        finished = engine.run_one(Group(x[images], y[images], images.tolist()))
        padding[side_by_side] = sum(rows) - finished.n_forward
        return finished

    whole = found(torch.arange(40), side_by_side=False)
    first, last = whole.survived.values()
    assert bool((whole.clean & ~first).any())
    assert bool(last.any())
    for some in (torch.arange(40), torch.arange(3, 40, 5)):
        together, alone = found(some, side_by_side=True), found(some, side_by_side=False)
        assert torch.equal(together.x_adv, whole.x_adv[some])
        assert torch.equal(together.log_one_minus_margin, whole.log_one_minus_margin[some])
        assert all(torch.equal(left, whole.survived[name][some]) for name, left in together.survived.items())
        assert (together.n_forward, together.n_backward) == (alone.n_forward, alone.n_backward)
        # If no run of APGD ends early and images outnumber rows, no row is empty.
        full = attacks == ["apgd-ce", "apgd-t"] and not stop and len(some) > 32
        assert padding[True] <= padding[False] if full else padding[True] < padding[False]


def ended(model: nn.Module, x: Tensor, y: Tensor, plan: Callable[[Callable[[ImageSummary], int], Setting], list[Run]]):
    """Run a plan to its end: (result, images, jobs by sample id); `plan` gets a function from image to sample id."""

    def sample_id(image: ImageSummary) -> int:
        """By its clean margin, which differs from all others."""
        ((_, records),) = engine._inside.values()
        return next(each.sample_id for each in records if -math.expm1(each.clean_log1m_margin) == image.clean_margin)

    engine = engine_of(
        model, x, attacks=(), rows=8, budget=AttackBudget(5, 3), stop_when_broken=False,
        planner=lambda setting, _: plan(sample_id, setting),
    )  # fmt: skip
    jobs: defaultdict[int, list[Job]] = defaultdict(list)
    advance = engine._advance

    def noted(image: ImageRecord) -> None:
        jobs[image.sample_id] += image.jobs
        advance(image)

    engine._advance = noted  # type: ignore[method-assign]
    engine.admit(all_of(x, y))
    ((_, images),) = engine._inside.values()
    return engine.run_one(all_of(x, y)), images, jobs


@pytest.mark.parametrize("side_by_side", [True, False])
def test_each_run_of_a_block_chooses_its_images(victim, side_by_side: bool) -> None:
    """An image that takes none of a block goes on to the next, and each run notes the margin that it reached."""
    model, x, y = victim(n=12)
    taken = {1: [], 2: [0, 1, 5], 3: [1, 5, 7, 11]}  # target -> sample ids

    def plan(sample_id: Callable[[ImageSummary], int], setting: Setting) -> list[Run]:
        def by(target: int) -> Callable[[ImageSummary], bool]:
            return lambda image: sample_id(image) in taken[target]

        chosen = [replace(run, wanted=by(run.target), block="a" * side_by_side) for run in apgd_t(setting)]
        return [*chosen, *apgd_ce(setting)]

    finished, images, jobs = ended(model, x, y, plan)
    assert bool(finished.decided.all())
    expected = [{**{target - 1: 6 for target in (1, 2, 3) if row in taken[target]}, 3: 6} for row in range(12)]
    assert [{job.place: job.n_passes for job in jobs[row]} for row in range(12)] == expected
    assert finished.n_backward == sum(sum(row.values()) for row in expected)
    reached = [max(image.clean_log1m_margin, *(job.reached for job in jobs[image.sample_id])) for image in images]
    assert reached == finished.log_one_minus_margin.tolist()


@pytest.mark.parametrize("name", ["a", ""])
def test_a_run_from_the_best_point_waits_for_the_runs_before_it(victim, name: str) -> None:
    model, x, y = victim(n=12)

    def plan(_: Callable[[ImageSummary], int], setting: Setting) -> list[Run]:
        first, second, *_ = apgd_t(setting)
        return [replace(first, block=name), replace(second, block=name, from_best=True)]

    _, images, jobs = ended(model, x, y, plan)
    for image in images:
        assert jobs[image.sample_id][1].reached >= jobs[image.sample_id][0].reached


def test_what_the_last_verification_breaks_did_not_survive(victim) -> None:
    """The passes of some GPUs do not repeat, so the last verification may differ from the ones before it."""
    model, x, y = victim(n=6)
    engine = engine_of(model, x, threat=ThreatModel("Linf", 1e-6))
    verify = engine.verifier.verify

    def flipped_at_the_end(x: Tensor, y: Tensor) -> Verified:
        found = verify(x, y)
        return found if engine._inside else replace(found, wrong=y >= 0)

    engine.admit(all_of(x, y))
    engine.verifier.verify = flipped_at_the_end
    found = engine.finish(None, lambda _: pytest.fail("it is inside"))
    assert found.broken.all() and not found.survived["apgd-t"].any()
    assert found.survived["apgd-ce"].all() and found.clean.all()


def test_float32_repeat_knows_the_margin_of_its_run(victim) -> None:
    model, x, y = victim(n=12)
    told: dict[tuple[int, int], float] = {}

    def plan(sample_id: Callable[[ImageSummary], int], setting: Setting) -> list[Run]:
        def by(target: int) -> Callable[[ImageSummary], bool]:
            def wanted(image: ImageSummary) -> bool:
                told[sample_id(image), target] = image.repeated_margin
                return image.repeated_margin == image.margin

            return wanted

        low = apgd_t(setting)
        return [*low, *(replace(run, float32=True, wanted=by(run.target), block="") for run in low)]

    _, images, jobs = ended(model, x, y, plan)
    for image in images:
        reached = {job.place: job.reached for job in jobs[image.sample_id]}
        assert [told[image.sample_id, target] for target in (1, 2, 3)] == [-math.expm1(reached[i]) for i in range(3)]
        best = max(range(3), key=reached.__getitem__)
        assert 3 + best in reached or image.log1m_margin > reached[best]


def test_first_target_that_breaks_an_image_counts(victim) -> None:
    """Later targets break at once and the first one only at its end: its point and its passes count."""
    model, x, y = victim(n=1)
    n_iter, anywhere = 6, ThreatModel("Linf", 1.0)

    @dataclass
    class State(SlotState):
        target: Counts

    class Steps(Stepper[State]):
        """Stays at the clean image until its last step, or goes at once where its target is not the runner-up."""

        state_type = State
        gradient_every = 0

        def start(self, state: State, slots: Tensor, batch: StartBatch) -> None:
            state.target[slots] = torch.tensor([run.target for run in batch.runs])

        def ask(self, state: State) -> Tensor:
            arrives = torch.where(state.target == breaks_last, n_iter - 1, 0)
            fools = (state.n_passes >= arrives) & (state.target >= breaks_last)
            return torch.where(fools[:, None, None, None], fooling[state.target - 1], state.x)

        def tell(self, state: State, x: Tensor, result: StepResult) -> Tensor:  # noqa: ARG002
            return state.n_passes >= n_iter

    noise = torch.rand(64, *x.shape[1:], generator=torch.Generator().manual_seed(3))
    fooling = noise[model(noise).argmax(dim=1) != y][:4]
    for breaks_last in (1, 2):
        runs = [Run("steps", Steps(anywhere), i, block="steps") for i in range(1, 5)]
        options = {"attacks": ("steps",), "planner": lambda *_, runs=runs: runs, "budget": AttackBudget(n_iter, 4)}
        finished = found_by(model, x, y, rows=8, threat=anywhere, **options)
        assert torch.equal(finished.x_adv, fooling[breaks_last - 1 : breaks_last])
        # A pass for the clean image and one for the result; per run its steps and one verification.
        assert finished.n_forward == 2 + breaks_last * (n_iter + 1)


def test_prefetched_groups_fill_slots_with_unchanged_bits(victim) -> None:
    model, x, y = victim(n=80)
    whole = found_by(model, x, y)
    firsts, made = list(range(0, 80, 8)), []

    def group(first: int) -> Group:
        made.append(first)
        return Group(x[first : first + 8], y[first : first + 8], range(first, first + 8))

    padding = {}
    for n_prefetched in (0, 2):
        rows: list[int] = []
        engine, n_backward = engine_of(estimating(model, rows=rows), x), 0
        for i, first in enumerate(firsts):
            found = engine.finish(first, group, firsts[i + 1 : i + 1 + n_prefetched])
            n_backward += found.n_backward
            assert torch.equal(found.x_adv, whole.x_adv[first : first + 8])
            assert torch.equal(found.log_one_minus_margin, whole.log_one_minus_margin[first : first + 8])
            assert bool(found.decided.all())
        assert not engine._inside and not engine._done
        padding[n_prefetched] = sum(rows) - n_backward
        assert n_backward == whole.n_backward
    assert made == firsts * 2
    assert padding[2] < padding[0] / 2


def test_finished_images_need_no_garbage_collector(victim) -> None:
    model, x, y = victim(n=16)
    engine = engine_of(model, x)
    gc.collect()
    gc.disable()
    try:
        for key in (0, 1):
            engine.finish(key, lambda at: Group(x[at::2], y[at::2], range(at, 16, 2)))
        assert not [each for each in gc.get_objects() if type(each) is ImageRecord]
    finally:
        gc.enable()


def test_failed_groups_load_again_and_unwanted_ones_are_dropped(victim) -> None:
    model, x, y = victim(n=12)
    whole, broken = found_by(model, x, y), True

    def group(first: int) -> Group:
        if first == 4 and broken:
            raise OSError("not there yet")
        return Group(x[first : first + 4], y[first : first + 4], range(first, first + 4))

    engine = engine_of(model, x)
    assert torch.equal(engine.finish(0, group, [4, 8]).x_adv, whole.x_adv[:4])
    with pytest.raises(OSError, match="not there yet"):
        engine_of(model, x).finish(4, group)
    broken = False
    assert torch.equal(engine.finish(4, group).x_adv, whole.x_adv[4:8])  # 8 went to another worker
    assert torch.equal(engine.finish(8, group).x_adv, whole.x_adv[8:])
    assert not engine._inside and not engine._done


def test_a_keyboard_interrupt_returns_what_is_verified_by_then(victim) -> None:
    model, x, y = victim(n=30)
    calls = 0

    def interrupted(images: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return model(images)

    found = minimum_margin_attack(interrupted, x, y, threat=LINF, n_iter=12, n_target_classes=2, batch_size=16)
    assert 0 < int(found.decided.sum()) < len(x)
    assert torch.equal(found.broken, model(found.x_adv).argmax(dim=1) != y)
    assert bool(found.broken[found.decided].any())


def test_progress_is_reported(victim, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y = victim(n=30)
    seen = []
    options = {"threat": LINF, "n_iter": 12, "n_target_classes": 2, "batch_size": 16}
    found = minimum_margin_attack(model, x, y, progress=seen.append, **options)
    assert seen[-1].n_images == seen[-1].n_decided == 30
    assert seen[-1].n_broken == int(found.broken.sum())
    assert [each.n_decided for each in seen] == sorted(each.n_decided for each in seen)
    minimum_margin_attack(model, x, y, verbose=True, **options)
    assert "30 of 30 images decided" in capsys.readouterr().err


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
        attack.attack_single_run(x, y, x_init=ball_of(threat).random_start(x, start_keys(name, len(x))))
    return -torch.expm1(smallest)


def as_small_as_the_plain_loop(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel) -> AttackResult:
    found = minimum_margin_attack(
        model, x, y, threat=threat, n_iter=20, n_target_classes=2, stop_when_broken=False, border_restarts=0,
        precision="fp32",
    )  # fmt: skip
    reference = plain_minimum_margins(model, x, y, threat, 20)
    assert float(found.margin.mean()) <= float(reference.mean()) + 1e-4
    assert torch.allclose(found.margin, reference, rtol=0, atol=1e-3)
    return found


@pytest.mark.parametrize("threat", [LINF, ThreatModel("L2", 0.15)], ids=str)
def test_margins_equal_those_of_a_plain_loop(victim, threat: ThreatModel) -> None:
    model, x, y = victim(n=16)
    found = as_small_as_the_plain_loop(model, x, y, threat)
    assert 0 < int(found.broken.sum()) < len(x)


def test_known_points_reorder_targets() -> None:
    clean, there = torch.randn(6, 10), torch.randn(6, 10)
    by_rank, ranks = ordered_targets(clean, 4, None)
    assert torch.equal(by_rank, clean.argsort(dim=1, descending=True)[:, 1:5])
    assert ranks.tolist() == [[2, 3, 4, 5]] * 6
    targets, moved = ordered_targets(clean, 4, Verified(there, torch.zeros(6), torch.zeros(6) > 0))
    assert torch.equal(targets.sort(dim=1).values, by_rank.sort(dim=1).values)
    assert torch.equal(by_rank.gather(1, moved - 2), targets), "random starts keep the key of the clean image's rank"
    logits = there.gather(1, targets)
    assert torch.equal(logits, logits.sort(dim=1, descending=True).values)


class SecondNeverWins(nn.Module):
    """Brighter images go to class 2; the label 0 and the runner-up do not move."""

    def forward(self, x: Tensor) -> Tensor:
        brighter = 10 * (x.flatten(1).mean(dim=1) - 0.5)
        still = torch.zeros_like(brighter)
        return torch.stack([still, still - 0.2, brighter - 0.9, still - 5], dim=1)


def test_known_point_orders_the_targets() -> None:
    x, y = torch.full((5, 1, 4, 4), 0.5), torch.zeros(5, dtype=torch.long)
    options = {"threat": ThreatModel("Linf", 0.1), "attacks": ["apgd-t"], "budget": AttackBudget(15)}
    blind, aimed = (
        engine_of(SecondNeverWins(), x, rows=8, **options).run_one(Group(x, y, range(5), known))
        for known in (None, x + 0.08)
    )
    assert blind.broken.all()
    assert aimed.broken.all()
    assert blind.n_backward - aimed.n_backward == 5 * 16, "the run towards the runner-up"


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "eps", "tolerance"), [("rob_c10_resnet4b", 2, 1e-5), ("rob_c10_cnn_wide_kw", 4, 1e-4)]
)
def test_batches_of_1_7_and_64_give_the_same_margins_on_cifar(name: str, eps: int, tolerance: float) -> None:
    x, y = open_dataset(CIFAR10).read(100, 112)
    model = load_classifier(f"py:{ZOO}:{name}", "rob")
    options = {"threat": ThreatModel("Linf", eps / 255), "n_iter": 20, "n_target_classes": 2, "precision": "fp32"}
    whole, few, alone = (minimum_margin_attack(model, x, y, batch_size=size, **options) for size in (64, 7, 1))
    for other in (few, alone):
        assert torch.equal(other.broken, whole.broken)
        # Other shapes round differently, and signs of gradients near 0 change: 3.3e-5 was seen, on the wide one.
        assert torch.allclose(other.margin, whole.margin, rtol=0, atol=tolerance)
    assert 0 < int(whole.broken.sum()) < len(x)


@pytest.mark.slow
@pytest.mark.real
def test_margins_on_cifar_are_not_above_those_of_a_plain_loop() -> None:
    x, y = open_dataset(CIFAR10).read(0, 24)
    model = load_classifier(f"py:{ZOO}:rob_c10_resnet4b", "rob")
    right = model(x).argmax(dim=1) == y
    as_small_as_the_plain_loop(model, x[right], y[right], ThreatModel("Linf", 2 / 255))

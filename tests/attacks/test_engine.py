"""The engine's promises: nothing is lost when memory ends, estimates are not verdicts, an image's result is its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import Tensor, nn

from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.adaptive import ensemble_plan
from mixednuts_dist.attacks.apgd import ApgdCe, ApgdT
from mixednuts_dist.attacks.attack import Arrivals, Attack, Known, Phase, Seen, Setting, SlotArrays
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.engine import Engine, Finished, Group, ordered_targets
from mixednuts_dist.attacks.gradient_model import AttackedModel, GradientModel, Outputs
from mixednuts_dist.attacks.judge import Verdicts
from mixednuts_dist.attacks.minimum_margin import MinimumMarginResult, minimum_margin_attack
from mixednuts_dist.attacks.stream import Stream
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.norms.ball import ball_of
from tests.helpers.real import CIFAR10, ZOO
from tests.helpers.small_nets import ShortOfMemory
from tests.helpers.stepping import read_late

LINF = ThreatModel("Linf", 0.015)


def make_engine(attacked: AttackedModel, rows: int = 16, *, n_iter: int = 12, stop: bool = True) -> Engine:
    """APGD-CE and two targets."""
    attacks = ("apgd-ce", "apgd-t")
    budget = AttackBudget(n_iter, 2)
    shape = BatchShape(rows, fixed=True)
    return Engine(attacked, lambda setting: ensemble_plan(setting, attacks), LINF, budget, 0, shape, stop)


def run_engine(attacked: AttackedModel, x: Tensor, y: Tensor, **options: int) -> Finished:
    return make_engine(attacked, **options).run_one(Group(x, y, range(len(x))))


@pytest.mark.parametrize("room", [1, 5, 9])
def test_running_out_of_memory_loses_nothing(victim, room: int) -> None:
    """What is left is another shape: equal verdicts, and margins up to rounding."""
    model, x, y = victim(n=30)
    expected = run_engine(AttackedModel.of(model), x, y)
    short = ShortOfMemory(model, room)
    found = run_engine(AttackedModel.of(short), x, y)
    assert short.refused > 0
    assert torch.equal(found.broken, expected.broken)
    assert torch.allclose(found.log_gap.exp(), expected.log_gap.exp(), atol=1e-4)
    assert 0 < int(found.broken.sum()) < len(x)


def test_memory_that_ends_in_the_middle_of_an_attack(victim) -> None:
    """Images that are set aside go on from their iteration: their path is the one without a break."""
    model, x, y = victim(n=20)
    short = ShortOfMemory(model, 20)
    calls = 0

    def shrinking(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            short.room = 6
        return short(x)

    found = run_engine(AttackedModel.of(shrinking), x, y)
    expected = run_engine(AttackedModel.of(model), x, y)
    assert short.refused > 0
    assert torch.allclose(found.best, expected.best, atol=1e-5)
    assert abs(found.n_backward - expected.n_backward) <= 3


def test_memory_that_ends_in_the_judge_leaves_the_lanes_with_fewer_slots(victim) -> None:
    model, x, y = victim(n=20)
    verdicts = []

    def short_later(x: Tensor) -> Tensor:
        verdicts.append(len(x))
        if len(verdicts) > 3 and len(x) > 5:
            raise torch.OutOfMemoryError(f"no room for {len(x)} images")
        return model(x)

    attacked = AttackedModel.of(model)
    found = run_engine(replace(attacked, model=short_later), x, y)
    assert max(verdicts) == 16
    assert torch.equal(found.broken, run_engine(attacked, x, y).broken)
    assert 0 < int(found.broken.sum()) < len(x)


def test_where_no_image_fits_the_error_gets_through(victim) -> None:
    model, x, y = victim(n=3)
    with pytest.raises(torch.OutOfMemoryError, match="no room for 1 images"):
        run_engine(AttackedModel.of(ShortOfMemory(model, 0)), x, y)


def estimating(model: nn.Module, estimate: Callable[[Tensor], Tensor]) -> AttackedModel:
    """A classifier whose passes report `estimate(logits)` in place of the classifier's logits."""

    def run(x: Tensor) -> Outputs:
        outputs = Outputs(model(x))
        outputs.model_logits = estimate(outputs.model_logits)
        return outputs

    return replace(AttackedModel.of(model), fast=GradientModel(run))


def test_an_image_that_only_seems_broken_goes_on(victim) -> None:
    """Passes that show success everywhere break nothing that the judge does not confirm, and end no attempt early."""
    model, x, y = victim(n=16)
    found = run_engine(estimating(model, torch.neg), x, y)
    with torch.no_grad():
        assert torch.equal(found.broken, model(found.best).argmax(dim=1) != y)
    standing = int((~found.broken).sum())
    assert standing > 0
    assert found.n_backward >= standing * 3 * 13


def test_an_image_that_seems_broken_again_and_again_keeps_its_slot(victim) -> None:
    """It is verified again where its margin is twice as deep, and as its phase ends; not after every step."""
    model, x, y = victim(n=60)
    label = y.mode().values
    x, y = x[y == label], y[y == label]
    alarm = torch.nn.functional.one_hot(label, 10) * 2.0
    engine, looks = make_engine(estimating(model, lambda logits: logits - alarm), n_iter=40), 0
    verdicts = engine.judge.verdicts

    def counted(x: Tensor, y: Tensor) -> Verdicts:
        nonlocal looks
        looks += len(x)
        return verdicts(x, y)

    engine.judge.verdicts = counted  # type: ignore[method-assign]
    found = engine.run_one(Group(x, y, range(len(x))))
    assert not bool(found.broken.all())
    assert looks < 6 * 3 * len(x)


def test_an_image_that_never_seems_broken_is_judged_as_its_phases_end(victim) -> None:
    model, x, y = victim(n=60)
    label = y.mode().values
    x, y = x[y == label], y[y == label]
    calm = torch.nn.functional.one_hot(label, 10) * 8.0
    found = run_engine(estimating(model, lambda logits: logits + calm), x, y)
    with torch.no_grad():
        assert torch.equal(found.broken, model(found.best).argmax(dim=1) != y)
    assert bool(found.broken.any())
    assert found.n_backward >= len(x) * 13, "no attempt leaves before its phase is over"


def test_flags_that_are_read_late_change_neither_result_nor_count(victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where flags are read one round after they were raised."""
    model, x, y = victim(n=30)
    prompt = run_engine(AttackedModel.of(model), x, y, rows=8)
    read_late(monkeypatch)
    found = run_engine(AttackedModel.of(model), x, y, rows=8)
    assert torch.equal(found.broken, prompt.broken)
    assert torch.equal(found.best, prompt.best)
    assert (found.n_forward, found.n_backward) == (prompt.n_forward, prompt.n_backward)


def test_groups_are_handed_back_as_they_are_decided_and_do_not_disturb_each_other(victim) -> None:
    """Slots stay full across groups; every image has the bits that it has alone."""
    model, x, y = victim(n=50)
    whole = run_engine(AttackedModel.of(model), x, y)
    bounds = [(0, 3), (3, 30), (30, 31), (31, 50)]

    def groups() -> Iterator[Group | None]:
        for first, stop in bounds:
            yield None
            yield Group(x[first:stop], y[first:stop], range(first, stop), key=(first, stop))

    engine = make_engine(AttackedModel.of(model))
    found = {finished.group.key: finished for finished in engine.run(groups())}
    assert sorted(found) == bounds
    for (first, stop), finished in found.items():
        assert torch.equal(finished.best, whole.best[first:stop])
        assert torch.equal(finished.log_gap, whole.log_gap[first:stop])
        assert finished.broken_by == whole.broken_by[first:stop]
    assert sum(finished.n_backward for finished in found.values()) == whole.n_backward


def test_slots_are_filled_from_the_next_group(victim) -> None:
    """Ten groups of eight in sixteen slots: hardly a row of a pass is padding."""
    model, x, y = victim(n=80)
    sizes: list[int] = []

    def watched(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return model(images)

    engine = make_engine(AttackedModel.of(watched))
    found = list(engine.run(Group(x[i : i + 8], y[i : i + 8], range(i, i + 8)) for i in range(0, 80, 8)))
    real = sum(finished.n_forward for finished in found)
    assert real / sum(sizes) > 0.75


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("attacks", [["apgd-t", "fab-t"], ["apgd-ce", "apgd-t"]], ids="-".join)
def test_phases_side_by_side_come_to_what_they_do_one_after_the_other(victim, attacks: list[str], stop: bool) -> None:
    """Bit for bit and pass for pass, of images that stand, that one phase breaks, and that several do."""
    model, x, y = victim(n=40)
    budget, padding = AttackBudget(12, 9), {}

    def found(images: Tensor, *, side_by_side: bool) -> Finished:
        def plan(setting: Setting) -> list[Phase]:
            phases = ensemble_plan(setting, attacks)
            return phases if side_by_side else [replace(phase, beside=False) for phase in phases]

        engine = Engine(AttackedModel.of(model), plan, LINF, budget, 0, BatchShape(32, fixed=True), stop)
        ids = images.tolist()
        finished = engine.run_one(Group(x[images], y[images], ids))
        padding[side_by_side] = engine.n_padding
        return finished

    whole = found(torch.arange(40), side_by_side=False)
    assert {"", attacks[0]} <= set(whole.broken_by)
    for some in (torch.arange(40), torch.arange(3), torch.arange(3, 40, 5)):
        together, alone = found(some, side_by_side=True), found(some, side_by_side=False)
        assert torch.equal(together.best, whole.best[some])
        assert torch.equal(together.log_gap, whole.log_gap[some])
        assert together.broken_by == [whole.broken_by[i] for i in some.tolist()]
        assert (together.n_forward, together.n_backward) == (alone.n_forward, alone.n_backward)
        # Where no run of APGD ends early and there are more images than rows, no row is left over.
        full = attacks == ["apgd-ce", "apgd-t"] and not stop and len(some) > 32
        assert padding[True] <= padding[False] if full else padding[True] < padding[False]


def rows_of(known: Known, engine: Engine) -> list[int]:
    """The images' rows, by their clean margins, which differ."""
    margins = -engine.tracks.clean_log_gap.expm1()
    return [int((margins == margin).nonzero()) for margin in known.clean_margin]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_each_phase_of_a_block_chooses_its_images(victim, side_by_side: bool) -> None:
    """An image that takes none of a block goes on to the next, and each attempt notes the margin that it reached."""
    model, x, y = victim(n=12)
    taken = {1: [], 2: [0, 1, 5], 3: [1, 5, 7, 11]}  # of each target, by sample id

    def plan(setting: Setting) -> list[Phase]:
        def by(target: int) -> Callable[[Known], Tensor]:
            return lambda known: torch.tensor([row in taken[target] for row in rows_of(known, engine)])

        targets = ApgdT(setting).phases()
        chosen = [replace(phase, wanted=by(phase.target), beside=side_by_side and phase.beside) for phase in targets]
        return [*chosen, *ApgdCe(setting).phases()]

    engine = Engine(AttackedModel.of(model), plan, LINF, AttackBudget(5, 3), 0, BatchShape(8), False)
    rows = torch.arange(12)
    finished = engine.run_one(Group(x, y, rows.tolist()))
    assert bool(finished.decided.all())
    expected = [[*(6 * (row in taken[target]) for target in (1, 2, 3)), 6] for row in range(12)]
    assert engine.tracks.taken[rows, :, 1].tolist() == expected
    assert finished.n_backward == sum(map(sum, expected))
    assert bool((engine.tracks.reached[rows] > -torch.inf).eq(torch.tensor(expected) > 0).all())
    found = engine.tracks.reached[rows].amax(dim=1)
    assert torch.equal(torch.maximum(found, engine.tracks.clean_log_gap[rows]), finished.log_gap)


def test_a_repetition_in_float32_knows_how_far_its_like_ended_above_the_best_one(victim) -> None:
    model, x, y = victim(n=12)
    rows, behind = torch.arange(12), torch.full((12, 3), torch.nan).double()

    def plan(setting: Setting) -> list[Phase]:
        def by(target: int) -> Callable[[Known], Tensor]:
            def wanted(known: Known) -> Tensor:
                behind[rows_of(known, engine), target - 1] = known.behind
                return known.behind == 0

            return wanted

        coarse = ApgdT(setting).phases()
        return [*coarse, *(replace(phase, in_float32=True, wanted=by(phase.target)) for phase in coarse)]

    engine = Engine(AttackedModel.of(model), plan, LINF, AttackBudget(5, 3), 0, BatchShape(8), False)
    engine.run_one(Group(x, y, rows.tolist()))
    margins = -engine.tracks.reached[rows, :3].expm1()
    assert torch.allclose(behind, margins - margins.amin(dim=1, keepdim=True), rtol=0, atol=1e-15)
    assert bool((behind.amin(dim=1) == 0).all())
    assert torch.equal(engine.tracks.taken[rows, 3:, 1] > 0, behind == 0)


def test_the_first_target_that_breaks_an_image_counts_however_late_it_does(victim) -> None:
    """Later targets break at once, the first one only in the end: its point stands, and only its passes count."""
    model, x, y = victim(n=1)
    n_iter = 6

    @dataclass
    class State(SlotArrays):
        x: Tensor
        target: Tensor
        iteration: Tensor

    class Steps(Attack):
        """Stays at the clean image until its last step, or goes at once where its target is not the runner-up."""

        takes_gradient = False

        def phases(self) -> list[Phase]:
            return [Phase("steps", f"steps/{target}", self, target, beside=target > 1) for target in range(1, 5)]

        def state(self, like_SCHW: Tensor) -> State:
            return State(like_SCHW.clone(), like_SCHW.new_zeros(len(like_SCHW)), like_SCHW.new_zeros(len(like_SCHW)))

        def begin(self, state: State, slots: Tensor, arrivals: Arrivals) -> None:
            first = torch.tensor([phase.target for phase in arrivals.phases], dtype=torch.float32)
            state.x[slots], state.target[slots], state.iteration[slots] = arrivals.x, first, 0.0

        def propose(self, state: State) -> Tensor:
            arrives = torch.where(state.target == breaks_last, n_iter - 1, 0)
            fools = (state.iteration >= arrives) & (state.target >= breaks_last)
            return torch.where(fools[:, None, None, None], fooling[state.target.long() - 1], state.x)

        def absorb(self, state: State, x_new: Tensor, seen: Seen) -> Tensor:  # noqa: ARG002
            state.iteration += 1
            return state.iteration >= n_iter

    noise = torch.rand(64, *x.shape[1:], generator=torch.Generator().manual_seed(3))
    fooling = noise[model(noise).argmax(dim=1) != y][:4]
    for breaks_last in (1, 2):
        engine = Engine(
            AttackedModel.of(model), lambda setting: Steps(setting).phases(), LINF, AttackBudget(n_iter, 4), 0,
            BatchShape(8, fixed=True),
        )  # fmt: skip
        finished = engine.run_one(Group(x, y, [0]))
        assert torch.equal(finished.best, fooling[breaks_last - 1 : breaks_last])
        # One to judge the clean image; of each phase until then its steps, and one to verify what it found.
        assert finished.n_forward == 1 + breaks_last * (n_iter + 1)


def test_prefetched_groups_fill_the_slots_and_have_the_bits_that_they_have_alone(victim) -> None:
    model, x, y = victim(n=80)
    whole = run_engine(AttackedModel.of(model), x, y)
    firsts, made = list(range(0, 80, 8)), []

    def group(first: int) -> Group:
        made.append(first)
        return Group(x[first : first + 8], y[first : first + 8], range(first, first + 8))

    padding = {}
    for n_prefetched in (0, 2):
        stream = Stream(make_engine(AttackedModel.of(model)), group)
        for i, first in enumerate(firsts):
            found = stream.finish(first, firsts[i + 1 : i + 1 + n_prefetched])
            assert found.group.key == first
            assert torch.equal(found.best, whole.best[first : first + 8])
            assert torch.equal(found.log_gap, whole.log_gap[first : first + 8])
            assert bool(found.decided.all())
        assert stream.n_decided == stream.n_forward_begun == 0
        padding[n_prefetched] = stream.engine.n_padding
    assert made == firsts * 2
    assert padding[2] < padding[0] / 2


def test_a_prefetched_group_that_fails_is_made_in_its_turn_and_one_that_is_not_wanted_again_is_dropped(victim) -> None:
    model, x, y = victim(n=12)
    broken = True

    def group(first: int) -> Group:
        if first == 4 and broken:
            raise OSError("not there yet")
        return Group(x[first : first + 4], y[first : first + 4], range(first, first + 4))

    stream = Stream(make_engine(AttackedModel.of(model)), group)
    assert stream.finish(0, [4, 8]).group.key == 0
    with pytest.raises(OSError, match="not there yet"):
        Stream(make_engine(AttackedModel.of(model)), group).finish(4)
    broken = False
    assert stream.finish(4).group.key == 4  # 8 went to another worker
    assert stream.finish(8).group.key == 8
    assert stream.n_decided == 0


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


def independent_of_the_batch(
    model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, tolerance: float = 1e-5
) -> None:
    options = {"threat": threat, "n_iter": 20, "n_target_classes": 2, "precision": "fp32"}
    whole, few, alone = (minimum_margin_attack(model, x, y, batch_size=size, **options) for size in (64, 7, 1))
    for other in (few, alone):
        assert torch.equal(other.broken, whole.broken)
        assert torch.allclose(other.margin, whole.margin, rtol=0, atol=tolerance)
    assert 0 < int(whole.broken.sum()) < len(x)


@pytest.mark.parametrize("name", ["demo:std", "demo:rob"])
def test_batches_of_1_7_and_64_give_the_same_margins(name: str) -> None:
    x, y = open_dataset("digits").read(0, 20)
    eps = {"demo:std": 0.03, "demo:rob": 0.15}[name]
    independent_of_the_batch(load_classifier(name, name), x, y, ThreatModel("Linf", eps))


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "eps", "tolerance"), [("rob_c10_resnet4b", 2, 1e-5), ("rob_c10_cnn_wide_kw", 4, 1e-4)]
)
def test_batches_of_1_7_and_64_give_the_same_margins_on_cifar(name: str, eps: int, tolerance: float) -> None:
    x, y = open_dataset(CIFAR10).read(100, 112)
    model = load_classifier(f"py:{ZOO}:{name}", "rob")
    # Other shapes round otherwise, and where a gradient is nearly 0 its sign turns: 3.3e-5 was seen, on the wide one.
    independent_of_the_batch(model, x, y, ThreatModel("Linf", eps / 255), tolerance)


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
        attack.attack_single_run(x, y, x_init=ball_of(threat).random_start(x, [(0, name, 0, i) for i in range(len(x))]))
    return -torch.expm1(smallest)


def as_small_as_the_plain_loop(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel) -> MinimumMarginResult:
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


@pytest.mark.real
def test_margins_on_cifar_are_not_above_those_of_a_plain_loop() -> None:
    x, y = open_dataset(CIFAR10).read(0, 24)
    model = load_classifier(f"py:{ZOO}:rob_c10_resnet4b", "rob")
    right = model(x).argmax(dim=1) == y
    as_small_as_the_plain_loop(model, x[right], y[right], ThreatModel("Linf", 2 / 255))


def test_targets_go_by_the_known_points_logits_and_stay_the_same_set() -> None:
    clean, there = torch.randn(6, 10), torch.randn(6, 10)
    by_rank, ranks = ordered_targets(clean, 4, None)
    assert torch.equal(by_rank, clean.argsort(dim=1, descending=True)[:, 1:5])
    assert ranks.tolist() == [[2, 3, 4, 5]] * 6
    targets, moved = ordered_targets(clean, 4, Verdicts(there, torch.zeros(6), torch.zeros(6) > 0))
    assert torch.equal(targets.sort(dim=1).values, by_rank.sort(dim=1).values)
    assert torch.equal(by_rank.gather(1, moved - 2), targets), "random starts keep the key of the clean image's rank"
    logits = there.gather(1, targets)
    assert torch.equal(logits, logits.sort(dim=1, descending=True).values)


class SecondNeverWins(nn.Module):
    """Of the label 0 and three others the runner-up does not move; brighter images go to class 2."""

    def forward(self, x: Tensor) -> Tensor:
        brighter = 10 * (x.flatten(1).mean(dim=1) - 0.5)
        still = torch.zeros_like(brighter)
        return torch.stack([still, still - 0.2, brighter - 0.9, still - 5], dim=1)


def test_a_broken_image_leaves_sooner_where_a_known_point_names_its_target() -> None:
    x, y = torch.full((5, 1, 4, 4), 0.5), torch.zeros(5, dtype=torch.long)

    def attacked(known: Tensor | None) -> Finished:
        model, threat, shape = AttackedModel.of(SecondNeverWins()), ThreatModel("Linf", 0.1), BatchShape(8, fixed=True)
        engine = Engine(model, lambda s: ensemble_plan(s, ["apgd-t"]), threat, AttackBudget(15), 0, shape)
        return engine.run_one(Group(x, y, range(5), known))

    blind, aimed = attacked(None), attacked(x + 0.08)
    assert blind.broken.all()
    assert aimed.broken.all()
    assert blind.n_backward - aimed.n_backward == 5 * 16, "the attempt against the runner-up"


def test_graphs_of_a_shape_that_did_not_fit_are_given_up(victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs keep the memory of their shape: after it ended, it would not come back."""
    given_up: list[bool] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: given_up.append(True))
    model, x, y = victim(n=12)
    short = replace(AttackedModel.of(model), fast=AttackedModel.of(ShortOfMemory(model, 9)).fast)
    found = run_engine(replace(short, fast=replace(short.fast, compiled=True)), x, y, n_iter=3)
    assert given_up
    assert torch.equal(found.broken, run_engine(AttackedModel.of(model), x, y, n_iter=3).broken)
    given_up.clear()
    run_engine(short, x, y, n_iter=3)
    assert not given_up

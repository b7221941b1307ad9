"""Every attack on a simulated GPU mixes no devices, waits in no step, and gives the CPU's results.

Float32 passes have a separate batch shape on a GPU, so they take a small part of its time.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.acceleration import batch_shape
from mixednuts_dist.acceleration import precision as precision_module
from mixednuts_dist.acceleration.batch_shape import FLOAT32_ROWS, STATE_IMAGES, BatchShape
from mixednuts_dist.acceleration.precision import FastCopies
from mixednuts_dist.attacks.adaptive import autoattack, minimum_margin_attack
from mixednuts_dist.attacks.batch import READ_EVERY
from mixednuts_dist.attacks.budget import STANDARD_ATTACKS, AttackBudget
from mixednuts_dist.attacks.gradient_model import AttackedModel, measured_rows, repeats_its_bits
from mixednuts_dist.attacks.plans import MMAA
from mixednuts_dist.attacks.result import AttackResult
from mixednuts_dist.attacks.scheduler import Group, Scheduler
from mixednuts_dist.config.register import ATTACKS
from tests.helpers.card_bodies import memory_that_ends_loses_nothing, no_round_waits, results_are_those_of_float32
from tests.helpers.simulated_card import SimulatedCard
from tests.helpers.small_nets import L2, LINF, QUICK, SHAPE, images, mixture, small_net


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with SimulatedCard() as entered:
        yield entered


TINY, SMALL = replace(QUICK, n_iter=3, n_queries=6), replace(LINF, eps=0.012)
USUAL = [(LINF, "fp32", "mixture"), (LINF, "bf16", "mixture"), (L2, "fp32", "one classifier")]
RARE = [each for each in product((LINF, L2), ("fp32", "bf16"), ("mixture", "one classifier")) if each not in USUAL]


class Counting(nn.Module):
    """A network that notes the rows of its passes, forward and backward apart."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.rows = network, Counter[tuple[bool, int]]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows[torch.is_grad_enabled() and x.requires_grad, len(x)] += 1
        logits: Tensor = self.network(x)
        return logits


def subject(kind: str, n: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    """A classifier with images that it gets right, on the CPU."""
    model = mixture() if kind == "mixture" else small_net(10, SHAPE, seed=0, sharpness=3)
    x = images(n, SHAPE)
    with torch.no_grad():
        return model, x, model(x).argmax(dim=1)


@pytest.mark.parametrize("attack", ATTACKS.names())
@pytest.mark.parametrize(
    ("threat", "precision", "kind"), [*USUAL, *(pytest.param(*each, marks=pytest.mark.soak) for each in RARE)], ids=str
)
def test_attacks_on_a_simulated_gpu_equal_the_cpu(attack: str, threat, precision, kind: str) -> None:
    """float32 gives the CPU's points; bfloat16 rounds differently on a GPU but its results hold on the CPU."""
    kind = "mixture" if attack == "joint" else kind
    model, x, y = subject(kind)
    options = {"threat": threat, "attacks": (attack,), "budget": TINY, "batch_size": 3, "precision": precision}
    expected = autoattack(model, x, y, **options)
    with SimulatedCard():
        found = autoattack(model.to("cuda"), x.to("cuda"), y.to("cuda"), **options)
        assert found.x_adv.is_cuda
        robust, x_adv = found.robust.cpu(), found.x_adv.cpu()
    if precision == "fp32":
        assert torch.equal(robust, expected.robust)
        assert torch.allclose(x_adv, expected.x_adv, atol=1e-4)
        # A GPU reads flags every fourth step, but the counts are equal.
        assert (found.n_forward, found.n_backward) == (expected.n_forward, expected.n_backward)
    with torch.no_grad():
        assert torch.equal(robust, subject(kind)[0](x_adv).argmax(dim=1) == y)


def test_a_mixed_device_a_wait_and_a_free_copy_are_seen(card) -> None:
    on_card, on_host = torch.rand(3, 4).to("cuda"), torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        on_card + on_host
    with pytest.raises(TypeError, match="numpy"):
        on_card.numpy()
    assert (on_card + 1).view(-1)[:2].is_cuda
    assert set(card.waits) == {"elsewhere blocking copy"}
    with pytest.raises(RuntimeError, match="same device"):
        on_card + torch.rand(3, 4).to("cuda:1")
    with pytest.raises(RuntimeError, match="indices of"):
        on_card[torch.tensor([0, 1]).to("cuda:1")]
    card.waits.clear()
    assert bool(on_card.sum() > 0)
    on_card[on_card > 0.5]
    assert card.waits.total() == 2
    pinned = torch.empty(3, 4, pin_memory=True)
    pinned.copy_(on_card, non_blocking=True)
    assert card.waits.total() == 2
    on_host.copy_(on_card, non_blocking=True)
    assert card.waits.total() == 3


def test_attack_waits_only_for_flags_and_verifications(card) -> None:
    """Only reads of flags, verifications, arriving images and probes wait for the GPU."""
    model, x, y = subject("one classifier", 12)
    model = Counting(model).eval()
    model, x, y = model.to("cuda"), x.to("cuda"), y.to("cuda")
    card.waits.clear()
    card.copies.clear()
    found = autoattack(
        model, x, y, threat=replace(LINF, eps=0.005), attacks=STANDARD_ATTACKS, budget=QUICK, batch_size=8,
        precision="fp32",
    )  # fmt: skip
    waits, copies, n_passes = card.waits.copy(), card.copies.copy(), model.rows.total()
    assert bool(found.robust.cpu().any())
    by_file: Counter[str] = Counter()
    for line, n in waits.items():
        by_file[line.partition(":")[0]] += n
    assert by_file.pop("attacks/verification.py") < n_passes / 8
    assert by_file.pop("attacks/batch.py") <= n_passes / READ_EVERY
    # Each call once: the checks of its model, images and gradients, the probe that compares the bits of a smaller
    # shape, and what is returned with the robust images.
    once = ("entry", "adaptive", "scheduler")
    assert by_file.keys() <= {"acceleration/batch_shape.py", *(f"attacks/{name}.py" for name in once)}
    assert by_file.total() <= 26, by_file
    # Noise is as large as images, so the GPU makes it from keys that the host sends without waiting.
    assert not [line for line in copies if line.startswith("norms/random") and "pageable" in line]
    # From the host come indices of images that arrive or leave.
    in_rounds = ("attacks/batch", "attacks/apgd", "attacks/square", "attacks/fab")
    assert not [line for line in copies if line.startswith(in_rounds) and "index" in line]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_second_gpu_gives_the_same_bits(precision: str) -> None:
    """The first one is torch's current device, which a library call on the second one must not touch."""
    model, x, y = subject("mixture", 6)
    options = {"threat": LINF, "attacks": ("apgd-ce", "fab-t", "square"), "budget": TINY, "precision": precision}
    found = []
    for device in ("cuda:0", "cuda:1"):
        outcome = autoattack(model.to(device), x.to(device), y.to(device), **options)
        assert {outcome.x_adv.device, outcome.robust.device} == {torch.device(device)}
        found.append(outcome.x_adv.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("attack", ATTACKS.names())
def test_the_bodies_of_the_tests_on_a_gpu_hold(attack: str, card) -> None:
    results_are_those_of_float32(attack, FastCopies("bf16"), n=6, budget=TINY)

    @contextmanager
    def waits_are_errors() -> Iterator[None]:
        before = card.waits.copy()
        yield
        assert card.waits == before

    no_round_waits(attack, waits_are_errors)


def test_memory_that_ends_on_a_gpu_loses_nothing(card) -> None:
    memory_that_ends_loses_nothing()
    assert card.waits


def test_state_images_counts_the_state_of_all_batches(card) -> None:
    """Whole AutoAttack on a mixed classifier, in bfloat16 with TF32 after it: six batches."""
    mixed, x, y = subject("mixture", 16)
    mixed, x, y = mixed.to("cuda"), x.to("cuda"), y.to("cuda")
    shape = BatchShape(16, fixed=True)
    engine = Scheduler(
        mixed, x, threat=LINF, attacks=STANDARD_ATTACKS, budget=TINY, shape=shape, copies=FastCopies("bf16")
    )  # fmt: skip
    engine.admit(Group(x, y, range(16)))
    for batch in engine._batches:
        batch._resize(shape.rows)
    arrays = [
        array
        for batch in engine._batches
        for part in (batch._state, batch._points)
        for array in vars(part).values()
        if isinstance(array, Tensor)
    ]
    held = sum(array.nbytes for array in [*arrays, x] if array.is_cuda)
    assert len(engine._batches) == 6
    assert STATE_IMAGES / 2 < held / (16 * x[0].nbytes) < STATE_IMAGES
    assert card.waits


def test_measured_rows_and_repeats_its_bits_work_on_a_gpu(card, monkeypatch) -> None:
    model, x, _ = subject("one classifier", 12)
    model.to("cuda")
    assert measured_rows(model, x.to("cuda"), "fp32", n_images=96) >= 4
    # The fastest batch may not have many more rows than a worker has images.
    monkeypatch.setattr(batch_shape, "efficient_rows", lambda _, most: most)
    for n_images, most in ((96, 128), (192, 256)):
        assert measured_rows(model, x.to("cuda"), "fp32", n_images=n_images) == most
    assert repeats_its_bits(model, x.to("cuda"), 16, "fp32")

    class Unsteady(nn.Module):
        """Equal logits in each pass, and another gradient."""

        n_passes = 0

        def forward(self, images: Tensor) -> Tensor:
            self.n_passes += 1
            return model(images + 1e-6 * self.n_passes * (images - images.detach()))

    assert not repeats_its_bits(Unsteady(), x.to("cuda"), 16, "fp32")
    assert card.waits


def attacked_in_two_precisions(shape: BatchShape) -> tuple[AttackResult, Counting, Counting]:
    """Attack images of which some are borderline: (result, low-precision network, float32 network)."""
    network, x = small_net(10, SHAPE, seed=0, sharpness=3), images(40, SHAPE)
    low, exact = Counting(network), Counting(network)
    attacked = AttackedModel(exact, AttackedModel.of(low).fast, AttackedModel.of(exact).fast)
    with torch.no_grad():
        y = network(x).argmax(dim=1)
    engine = Scheduler(attacked, x, threat=SMALL, attacks=MMAA, budget=AttackBudget(10, 3), shape=shape)
    found = engine.run_one(Group(x, y, range(40)))
    assert 0 < int(found.broken.sum()) < 40
    return found, low, exact


def test_verifications_on_a_gpu_have_fewer_rows() -> None:
    one, _, _ = attacked_in_two_precisions(BatchShape(128, fixed=True))
    found, low, exact = attacked_in_two_precisions(BatchShape(128, fixed=True, float32_rows=8))
    assert {rows for _, rows in low.rows} == {128}
    assert set(exact.rows) == {(True, 128), (False, 8)}
    assert torch.equal(found.broken, one.broken)
    assert torch.allclose(found.log_one_minus_margin, one.log_one_minus_margin, atol=1e-5)
    assert (found.n_forward, found.n_backward) == (one.n_forward, one.n_backward)


def test_on_a_cpu_there_is_one_shape_and_on_a_card_two() -> None:
    here, there = BatchShape.of(128, torch.device("cpu")), BatchShape.of(128, torch.device("cuda"))
    assert here.float32 is here
    assert (there.rows, there.float32.rows) == (128, FLOAT32_ROWS)
    small = BatchShape.of(FLOAT32_ROWS, torch.device("cuda"))
    assert small.float32 is small
    there.float32.shrink(FLOAT32_ROWS)
    assert (there.rows, there.float32.rows) == (128, FLOAT32_ROWS // 2), "memory that ends for one leaves the other"


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("bf16_seconds", "chosen"), [(0.3, "bf16"), (0.4, "tf32")])
def test_auto_takes_bfloat16_if_it_is_clearly_faster_than_tf32(monkeypatch, bf16_seconds, chosen: str) -> None:
    monkeypatch.setattr(precision_module, "_has_tensor_cores", lambda _: True)
    seconds = {"fp32": 1.0, "tf32": 0.5, "bf16": bf16_seconds}
    monkeypatch.setattr(precision_module, "_seconds", lambda *given: seconds[given[2]])
    network = small_net(10, SHAPE, seed=0).to("cuda")
    assert FastCopies("auto").of_network(network, images(8, SHAPE).to("cuda")).precision == chosen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_verifies_in_the_rows_for_it(precision) -> None:
    network, x = Counting(small_net(10, SHAPE, seed=0, sharpness=3)), images(40, SHAPE)
    with SimulatedCard():
        there = network.to("cuda")
        y = there(x.to("cuda")).argmax(dim=1)
        network.rows.clear()
        minimum_margin_attack(
            there, x.to("cuda"), y, threat=SMALL, n_iter=5, n_target_classes=2, batch_size=2 * FLOAT32_ROWS,
            precision=precision,
        )  # fmt: skip
    forward = {rows for takes_gradient, rows in network.rows if not takes_gradient}
    assert FLOAT32_ROWS in forward
    assert max(forward) == FLOAT32_ROWS

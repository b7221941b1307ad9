"""Float32 passes have a separate batch shape on a GPU, so they take a small part of its time."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.acceleration.batch_shape import FLOAT32_ROWS, BatchShape
from mixednuts_dist.attacks.adaptive import minimum_margin_attack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import AttackedModel, GradientModel
from mixednuts_dist.attacks.result import AttackResult
from mixednuts_dist.attacks.scheduler import Group, Scheduler
from mixednuts_dist.config.threat import ThreatModel
from tests.helpers.simulated_card import SimulatedCard
from tests.helpers.small_nets import images, small_net

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (3, 8, 8)


class Counting(nn.Module):
    """A network that notes the rows of its passes, forward and backward apart."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.rows = network, Counter[tuple[bool, int]]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows[torch.is_grad_enabled() and x.requires_grad, len(x)] += 1
        logits: Tensor = self.network(x)
        return logits

    def cost(self) -> int:
        return sum(n * rows * (1 + takes_gradient) for (takes_gradient, rows), n in self.rows.items())


def attacked_in_two_precisions(shape: BatchShape) -> tuple[AttackResult, Counting, Counting]:
    """Attack images of which some are borderline: (result, low-precision network, float32 network)."""
    network, x = small_net(10, SHAPE, seed=0, sharpness=3), images(40, SHAPE)
    low, exact = Counting(network), Counting(network)
    model = AttackedModel.of(exact)
    low_model = AttackedModel.of(low).fast
    attacked = AttackedModel(exact, GradientModel(low_model.run), GradientModel(model.fast.run))
    with torch.no_grad():
        y = network(x).argmax(dim=1)
    attacks = ("apgd-ce", "apgd-t")
    threat, budget = ThreatModel("Linf", 0.012), AttackBudget(10, 3)
    engine = Scheduler(attacked, x, threat=threat, attacks=attacks, budget=budget, shape=shape)
    found = engine.run_one(Group(x, y, range(40)))
    assert 0 < int(found.broken.sum()) < 40
    return found, low, exact


def test_float32_passes_on_a_gpu_are_small_and_full() -> None:
    one, low, exact = attacked_in_two_precisions(BatchShape(128, fixed=True))
    before = exact.cost()
    found, low, exact = attacked_in_two_precisions(BatchShape(128, fixed=True, float32_rows=8))
    assert {rows for _, rows in low.rows} == {128}
    assert {rows for _, rows in exact.rows} == {8}
    assert exact.cost() < 0.7 * before
    assert torch.equal(found.broken, one.broken)
    assert torch.allclose(found.log_one_minus_margin, one.log_one_minus_margin, atol=1e-5)
    assert (found.n_forward, found.n_backward) == (one.n_forward, one.n_backward)


def test_on_a_cpu_there_is_one_shape_and_on_a_card_two() -> None:
    here, there = BatchShape.of(64, CPU), BatchShape.of(64, CARD)
    assert here.float32 is here
    assert (there.rows, there.float32.rows) == (64, FLOAT32_ROWS)
    small = BatchShape.of(FLOAT32_ROWS, CARD)
    assert small.float32 is small
    there.float32.shrink(FLOAT32_ROWS)
    assert (there.rows, there.float32.rows) == (64, FLOAT32_ROWS // 2), "memory that ends for one leaves the other"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_simulated_card_verifies_in_its_own_rows(precision) -> None:
    network, x = Counting(small_net(10, SHAPE, seed=0, sharpness=3)), images(40, SHAPE)
    with SimulatedCard():
        there = network.to("cuda")
        y = there(x.to("cuda")).argmax(dim=1)
        network.rows.clear()
        minimum_margin_attack(
            there, x.to("cuda"), y, threat=ThreatModel("Linf", 0.012), n_iter=5, n_target_classes=2, batch_size=32,
            precision=precision,
        )  # fmt: skip
    forward = {rows for takes_gradient, rows in network.rows if not takes_gradient}
    assert FLOAT32_ROWS in forward
    assert max(forward) == FLOAT32_ROWS

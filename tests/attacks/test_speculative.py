"""Speculative queries: an image's search is the one of a query a pass, whatever rows its company leaves it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.attack import Seen, SpeculativeRows
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.engine import Engine, Finished, Group
from mixednuts_dist.attacks.gradient_model import AttackedModel, GradientModel, Outputs
from mixednuts_dist.attacks.square import Square, SquareMargin
from mixednuts_dist.config.threat import ThreatModel
from tests.helpers.stepping import read_late

N_QUERIES = 120
LINF, L2 = ThreatModel("Linf", 0.02), ThreatModel("L2", 0.2)


def searched(
    attacked: AttackedModel, x: Tensor, y: Tensor, ids: range, *, threat: ThreatModel = LINF,
    kind: type[Square] = Square,
    rows: int = 16, stop: bool = True,
) -> tuple[Finished, Engine]:  # fmt: skip
    engine = Engine(
        attacked, lambda setting: kind(setting).phases(), threat, AttackBudget(n_queries=N_QUERIES), 0,
        BatchShape(rows, fixed=True), stop,
    )  # fmt: skip
    return engine.run_one(Group(x, y, ids)), engine


def row_by_row(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same bits of an image in every shape."""
    return lambda x: torch.cat([model(row) for row in x.split(1)])


class Doubted:
    """Its passes show the largest logit as smaller than it is, so that the judge refutes what they find."""

    def __init__(self, model: Callable[[Tensor], Tensor], by: float) -> None:
        self.model, self.by = model, by
        self.n_passed = self.n_judged = 0

    def attacked(self) -> AttackedModel:
        return replace(AttackedModel.of(self.judged), fast=GradientModel(self.passed))

    def passed(self, x: Tensor) -> Outputs:
        self.n_passed += len(x)
        outputs = Outputs(self.model(x))
        outputs.model_logits = outputs.logits - self.by * (outputs.logits == outputs.logits.amax(dim=1, keepdim=True))
        return outputs

    def judged(self, x: Tensor) -> Tensor:
        self.n_judged += len(x)
        return self.model(x)


@pytest.mark.parametrize(
    ("kind", "threat", "stop"),
    [(Square, LINF, True), (Square, L2, False), (SquareMargin, L2, True), (SquareMargin, LINF, False)],
    ids=str,
)
def test_an_image_alone_is_searched_as_among_others(
    victim, kind: type[Square], threat: ThreatModel, stop: bool
) -> None:
    """Among fifteen others it has one query a pass, alone sixteen: the same points, margins and counted passes."""
    model, x, y = victim(n=16)
    passes = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return model(x)

    options = {"kind": kind, "threat": threat, "stop": stop}
    whole, _ = searched(AttackedModel.of(model), x, y, range(16), **options)
    alone = []
    for i in range(16):
        passes = 0
        alone.append(searched(AttackedModel.of(counted), x[i : i + 1], y[i : i + 1], range(i, i + 1), **options)[0])
        assert passes < N_QUERIES / 2
    assert torch.equal(torch.cat([each.best for each in alone]), whole.best)
    assert torch.equal(torch.cat([each.log_gap for each in alone]), whole.log_gap)
    assert sum(each.n_forward for each in alone) == whole.n_forward
    assert 0 < int(whole.broken.sum()) < 16
    assert stop or whole.n_forward == 16 * (2 + N_QUERIES + 1)


class Unmoved(Square):
    """Keeps none of its points, so that only one that fools ends what counts of a pass."""

    def _losses(self, seen: Seen) -> Tensor:
        return torch.full_like(seen.log_gap, torch.inf)


@pytest.mark.parametrize("rows", [2, 7, 64])
@pytest.mark.parametrize("by", [0.0, 0.6])
@pytest.mark.parametrize("kind", [Square, Unmoved])
def test_any_number_of_rows_gives_the_search_of_a_query_a_pass(
    victim, rows: int, by: float, kind: type[Square]
) -> None:
    """Also where the judge refutes what seems broken, and the image goes on."""
    model, x, y = victim(n=7)
    single, several = (Doubted(row_by_row(model), by) for _ in range(2))
    expected, _ = searched(single.attacked(), x, y, range(7), rows=1, kind=kind)
    found, engine = searched(several.attacked(), x, y, range(7), rows=rows, kind=kind)
    assert torch.equal(found.best, expected.best)
    assert torch.equal(found.log_gap, expected.log_gap)
    assert found.n_forward == expected.n_forward == single.n_passed + single.n_judged
    assert several.n_passed == single.n_passed + engine.n_padding
    assert (single.n_judged > 14) == (by > 0), "beside the clean image and the end of the search"


def test_memory_that_ends_in_the_middle_of_a_search_loses_and_repeats_no_query(victim) -> None:
    model, x, y = victim(n=7)
    exact, room, passes = row_by_row(model), 64, 0

    def shrinking(x: Tensor) -> Tensor:
        nonlocal room, passes
        passes += 1
        room = {10: 20, 20: 3}.get(passes, room)
        if len(x) > room:
            raise torch.OutOfMemoryError(f"no room for {len(x)} images")
        return exact(x)

    expected, _ = searched(AttackedModel.of(exact), x, y, range(7), rows=1)
    found, _ = searched(AttackedModel.of(shrinking), x, y, range(7), rows=64)
    assert room == 3
    assert torch.equal(found.best, expected.best)
    assert found.n_forward == expected.n_forward


def test_flags_that_are_read_late_change_neither_result_nor_count(victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where flags and counts are read one round after they were raised."""
    model, x, y = victim(n=20)
    prompt, _ = searched(AttackedModel.of(model), x, y, range(20))
    read_late(monkeypatch)

    found, _ = searched(AttackedModel.of(model), x, y, range(20))
    assert torch.equal(found.best, prompt.best)
    assert found.n_forward == prompt.n_forward


def test_rows_by_depth() -> None:
    layout = SpeculativeRows.of(3, 8, torch.device("cpu"))
    assert layout.by_depth(10 * layout.slot_R + layout.depth_R, -1).tolist() == [[0, 10, 20], [1, 11, 21], [2, 12, -1]]

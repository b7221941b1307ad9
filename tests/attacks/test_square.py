"""Square: the published queries, given the same random numbers, and random numbers of the image alone."""

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
from pyautoattack.square import SquareAttack
from torch import Tensor

from mixednuts_dist.attacks.attack import Run, Setting
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.square import (
    COIN,
    COLUMN,
    COLUMN_2,
    ROW,
    ROW_2,
    SIGNS,
    WINDOWS,
    draws_of_query,
    square,
    square_margin,
)
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.norms.ball import ball_of
from mixednuts_dist.norms.random import below, hashed, key_number
from tests.helpers.small_nets import images, small_net
from tests.helpers.stepping import Pass, start_keys, stepped

N_QUERIES = 210  # windows shrink after 10, 50 and 200 queries
SEED = 4  # with 3 the float32 roundings of one search in L1 add up to 1.4e-3
LINF, L2, L1 = ThreatModel("Linf", 0.05), ThreatModel("L2", 0.5), ThreatModel("L1", 3.0)
LARGE = ThreatModel("Linf", 0.3), ThreatModel("L2", 4.0), ThreatModel("L1", 20.0)


class Published(SquareAttack):
    """The package's attack on one image, on our random numbers; keeps what it asks.

    The image is given twice: from a batch of one the package keeps its best loss in float32.
    """

    def __init__(self, model: Callable[[Tensor], Tensor], threat: ThreatModel, n_queries: int, sample_id: int) -> None:
        super().__init__(
            self.asked, norm=threat.norm, eps=threat.eps, n_queries=n_queries, resc_schedule=False,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.model, self.queries, self.key = model, [], torch.tensor([key_number(SEED, "square", 0, sample_id)])

    def asked(self, x: Tensor) -> Tensor:
        self.queries.append(x[0].clone())
        self.draws = draws_of_query(self.key, torch.tensor([len(self.queries)]), x.shape[1])[0]
        self.corners = iter((ROW, COLUMN, ROW_2, COLUMN_2))
        return self.model(x)

    def random_int(self, low: int = 0, high: int = 1, shape: tuple[int, ...] = (1,)) -> Tensor:
        assert (low, list(shape)) == (0, [1])
        return below(self.draws[next(self.corners)].view(1), torch.tensor([high]))

    def random_choice(self, shape: list[int]) -> Tensor:
        signs = torch.where(self.draws[SIGNS:] >= 0, 1.0, -1.0) if self.queries else next(self.start)
        return signs.expand(*shape[:1], *signs.shape).reshape(shape) if len(shape) == 4 else signs.view(shape)

    def eta(self, s: int) -> Tensor:
        turned = bool(self.draws[COIN] >= 0) if self.queries else next(self.turns)
        with patch("torch.rand", lambda shape: torch.full(shape, float(turned))):
            return super().eta(s)

    def search(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Every query on the image x, (1, C, H, W)."""
        x, y = x.expand(2, *x.shape[1:]), y.expand(2)
        n_channels, height, width = x.shape[1:]
        if self.norm == "Linf":
            draws = hashed(self.key, -(1 << 40), n_channels * width)
            self.start = iter([torch.where(draws >= 0, 1.0, -1.0)])
        else:
            n_tiles = (height // (height // 5)) ** 2
            draws = hashed(self.key, -(1 << 40), n_tiles * (1 + n_channels)).view(n_tiles, 1 + n_channels)
            self.turns = iter((draws[:, 0] >= 0).tolist())
            self.start = iter(torch.where(draws[:, 1:] >= 0, 1.0, -1.0))
        self.init_hyperparam(x)
        self.attack_single_run(x, y)
        return self.queries


def ours(run: Run, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, ids: list[int]) -> list[Pass]:
    keys = torch.tensor([key_number(SEED, run.name, 0, sample_id) for sample_id in ids])
    return list(stepped(run, model, x, y, keys=keys))


def planned(threat: ThreatModel, n_queries: int, attack: Callable[[Setting], list[Run]] = square) -> Run:
    return attack(Setting(threat, AttackBudget(n_queries=n_queries), 10))[0]


@pytest.mark.parametrize(
    ("threat", "shape"),
    [*product((LINF, L2, L1), [(3, 32, 32), (1, 10, 10)]), *product(LARGE, [(1, 28, 28), (1, 10, 10)])],
    ids=str,
)
def test_queries_equal_the_published_ones(
    threat: ThreatModel, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where rounding decides no query: in L1 the package would project in float32."""
    monkeypatch.setattr("pyautoattack.square.L1_projection", projected)
    net, x, ids = small_net(10, shape).double(), images(3, shape).double(), [4, 0, 100]

    def never_fooled(x: Tensor) -> Tensor:
        return torch.cat([net(x), 0 * x[:, 0, 0, :1] + 100], dim=1)

    assert compared(threat, net, x, ids) >= 3
    assert compared(threat, never_fooled, x[:2], ids[:2]) == 2 * (N_QUERIES + 1)


def projected(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    """Return the correction of `delta` onto the ball (tests/norms/test_ball.py compares it with the package's)."""
    return ball_of(ThreatModel("L1", eps)).project(x + delta, x) - x - delta


def compared(threat: ThreatModel, model: Callable[[Tensor], Tensor], x: Tensor, ids: list[int]) -> int:
    """How many queries were compared, all equal."""
    y = model(x).argmax(dim=1)
    mine = ours(planned(threat, N_QUERIES), model, x, y, ids)
    assert len(mine) == N_QUERIES + 1
    assert not any(step.took_gradient for step in mine)
    n_compared = 0
    for i, sample_id in enumerate(ids):
        theirs = Published(model, threat, N_QUERIES, sample_id).search(x[i : i + 1], y[i : i + 1])
        for query, (a, b) in enumerate(zip(mine, theirs, strict=False)):  # theirs ends where the image is fooled
            apart = float((a.x[i] - b).abs().max())
            # In L1 the float32 roundings of hundreds of bumps come together in the few pixels that are left.
            assert apart < {"L1": 1e-3}.get(threat.norm, 2e-5), f"image {i}, query {query}: {apart}"
            n_compared += 1
    return n_compared


@pytest.mark.parametrize("threat", [LINF, L2, L1], ids=str)
@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 9, 6), (1, 6, 13), (2, 3, 3), (1, 1, 1), (1, 2, 40)], ids=str)
def test_any_shape_is_searched_inside_the_ball(threat: ThreatModel, shape: tuple[int, int, int]) -> None:
    net, x = small_net(5, shape), images(4, shape)
    n_queries = 200 if threat.norm == "L1" else 40
    passes = ours(planned(threat, n_queries), net, x, net(x).argmax(dim=1), [0, 1, 2, 3])
    changed = torch.zeros(x.shape[2:], dtype=torch.bool)
    for step in passes:
        assert float(ball_of(threat).length(step.x - x).max()) <= threat.eps * (1 + 1e-5)
        assert float(step.x.min()) >= 0
        assert float(step.x.max()) <= 1
        changed |= (step.x != x).any(dim=1).any(dim=0)
    # A window of L1 moves few pixels, so single ones may stay unchanged, but not the last rows.
    reached = float(changed.float().mean())
    assert reached > 0.95 if threat.norm == "L1" else reached == 1
    assert bool(changed[-1].any())
    assert bool(changed[:, -1].any())


def test_saturated_logits_still_order_the_queries() -> None:
    net, x = small_net(10, (3, 8, 8), sharpness=4000), images(5, (3, 8, 8))
    y, exact = net(x).argmax(dim=1), small_net(10, (3, 8, 8), sharpness=4000).double()
    n_lowered = 0
    for seed in range(8):
        run, keys = planned(LINF, 60, square_margin), start_keys("square-margin", 5, seed)
        state, losses, asked = run.stepper.init(x), [], []
        for step in stepped(run, net, x, y, keys=keys, state=state):
            losses.append(state.loss.clone())
            asked.append(-log_one_minus_signed_margin(exact(step.x.double()), y))
        first, least = asked[0], torch.stack(asked).amin(dim=0)
        assert torch.allclose(losses[-1], least, rtol=1e-4), "the smallest margin of all queries, in float64, is kept"
        assert torch.equal(losses[-1] < losses[0], least < first)
        assert bool(torch.isfinite(losses[-1]).all())
        n_lowered += int((losses[-1] < losses[0]).sum())
    # With seed 4 the start on one image is better than all of its 60 queries, in float64 too.
    assert n_lowered >= 39


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_bumps_equal_the_published_ones(size: int, norm: str) -> None:
    with patch("torch.rand", torch.zeros):
        published = SquareAttack(lambda x: x, norm=norm, eps=1.0, device=torch.device("cpu")).eta(size)
    assert torch.allclose(WINDOWS[norm].bump(size), published, atol=1e-6)


@pytest.mark.parametrize("norm", list(WINDOWS))
def test_windows_shrink_as_published(norm: str) -> None:
    attack = SquareAttack(lambda x: x, norm=norm, eps=1.0, resc_schedule=False)
    x, stepper = images(1, (3, 32, 32)), planned(ThreatModel(norm, 1.0), 1).stepper
    state = stepper.init(x)
    for query in (*range(1, 70), 201, 202, 501, 502, 1001, 1002, 2001, 2002, 4001, 4002, 6001, 6002, 8001, 8002, 20000):
        exact = (attack.p_selection(query - 1) * 32 * 32) ** 0.5
        size = max(round(exact), 1) if norm == "Linf" else max(round(exact), 3) | 1
        state.n_passes[:] = query
        assert int(state.windows.sizes[state.windows.n_halved(state)]) == min(size, 32)
    assert WINDOWS[norm].size(0, 3, 50) == 3


def test_slots_that_have_ended_are_harmless() -> None:
    x = images(2, (1, 8, 8))
    for threat in (LINF, L2, L1):
        stepper = planned(threat, 5).stepper
        state = stepper.init(x)
        state.n_passes[:] = torch.tensor([6, 60])
        assert stepper.ask(state).shape == x.shape

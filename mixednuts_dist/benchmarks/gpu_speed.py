"""How fast a device is beside what it could be and beside pyautoattack: steps of `mixednuts benchmark gpu`.

Shapes: B images of C x H x W.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..acceleration.arithmetic import Arithmetic
from ..acceleration.batch_shape import FLOAT32_ROWS, ON_CARD, BatchShape, fastest_of_three, repeated
from ..acceleration.gradient_copy import input_gradient
from ..attacks.adaptive import autoattack, ensemble_engine
from ..attacks.budget import STANDARD_ATTACKS, AttackBudget
from ..attacks.engine import Engine, Group
from ..attacks.judge import Judge
from ..attacks.lane import Lane
from ..attacks.minimum_margin import margin_engine
from ..attacks.published import pyautoattack_images
from ..config.threat import ThreatModel
from .float32 import Act, counted, watch
from .gpu_checks import WARM_UP, Found, Place, made_up

# What is aimed at on a card.
_LEAST_SPEEDUP, _LEAST_SHARE, _MOST_FLOAT32, _MOST_BOOKKEEPING = 4.0, 0.4, 0.25, 0.05


def rate(at: Place, make: Callable[[], nn.Module], size: int) -> Found:
    """Images a second of forward and backward, as a share of the rate of a matrix product; bfloat16 on a GPU."""
    network = make().eval().requires_grad_(False).to(at.device)
    x = made_up(8, (3, size, size), at)
    made = Arithmetic(at.precision).network_copy(network, x, 64).made
    per_second = {}
    for rows in (64, 128, 256, 512) if at.on_card else (4, 8):
        batch = repeated(x, rows)
        try:
            per_second[rows] = rows / fastest_of_three(partial(_both_ways, made, batch))
        except torch.OutOfMemoryError:
            break
    limit = _limit(at, network, x)
    best = max(per_second, key=lambda rows: per_second[rows])
    share = per_second[best] / limit
    told = ", ".join(f"{rate:.3g} at {rows}" for rows, rate in per_second.items())
    return share >= _LEAST_SHARE if at.on_card else None, f"images/s: {told} rows; {share:.0%} of the matmul rate"


def _limit(at: Place, network: nn.Module, x: Tensor) -> float:
    """Images a second, forward and backward, at the rate of a matrix product in the device's precision."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x[:1])
    flops: int = (
        2 * counter.get_total_flops()
    )  # the gradient of a frozen network by its images costs about one forward more
    matrix = torch.ones(at.matmul_size, at.matmul_size, device=at.device, dtype=torch.bfloat16 if at.on_card else None)
    rate: float = 2.0 * at.matmul_size**3 / fastest_of_three(lambda: matrix @ matrix)
    return rate / flops


def _both_ways(network: nn.Module, x_BCHW: Tensor) -> Tensor:
    leaf = x_BCHW.clone().requires_grad_()
    return input_gradient(network(leaf).sum(), leaf)


def against_pyautoattack(at: Place, attacks: tuple[str, ...]) -> Found:
    attacked = at.attacked
    arithmetic, seconds, standing = Arithmetic("auto"), {}, {}
    settings: dict[str, Any] = {"threat": at.threat, "budget": at.budget, "attacks": attacks, "batch_size": at.rows}
    autoattack(attacked.network, attacked.x, attacked.y, arithmetic=arithmetic, **{**settings, "budget": WARM_UP})
    for name, strict in (("TF32 as torch has it", False), ("TF32 off", True)):
        started = time.perf_counter()
        x_adv, _, _ = pyautoattack_images(attacked.network, attacked.x, attacked.y, seed=0, strict=strict, **settings)
        standing[name] = int((Judge(attacked.network, BatchShape(64)).logits(x_adv).argmax(1) == attacked.y).sum())
        seconds[name] = time.perf_counter() - started
    started = time.perf_counter()
    robust = autoattack(attacked.network, attacked.x, attacked.y, arithmetic=arithmetic, **settings).robust
    ours = time.perf_counter() - started
    told = ", ".join(f"{theirs / ours:.2f} times ({name})" for name, theirs in seconds.items())
    ok = int(robust.sum()) <= min(standing.values()) + 1
    fast = not at.on_card or attacks != STANDARD_ATTACKS or seconds["TF32 off"] / ours >= _LEAST_SPEEDUP
    return ok and fast, f"{told}; {int(robust.sum())} stand, of pyautoattack's {', '.join(map(str, standing.values()))}"


def lanes(at: Place) -> Found:
    """Seconds of each lane's steps and of the judge's; the share of float32 among them."""
    attacked, shape = at.attacked, BatchShape.of(at.rows, at.device)
    engine = ensemble_engine(
        attacked.network, attacked.x, threat=at.threat, attacks=STANDARD_ATTACKS, budget=at.budget, shape=shape,
        arithmetic=Arithmetic("bf16"),
    )  # fmt: skip
    whole, seconds, _ = _timed(at, engine, attacked.x, attacked.y)
    share = sum(each for name, each in seconds.items() if "float32" in name) / whole
    told = ", ".join(f"{name} {each:.2g} s" for name, each in sorted(seconds.items(), key=lambda item: -item[1]))
    return share < _MOST_FLOAT32 if at.on_card else None, f"float32 {share:.0%} of {whole:.3g} s; {told}"


def float32_by_passes(at: Place) -> Found:
    """Float32's share of MMAA's work where a float32 row costs ten bfloat16 ones, from counts of passes."""
    found = counted(at.attacked, BatchShape(ON_CARD, float32_rows=FLOAT32_ROWS), AttackBudget())
    told = f"{found['share']:.0%} of the work; {found['useful_rows']:.1f} useful rows of {FLOAT32_ROWS}"
    return found["share"] < _MOST_FLOAT32 if at.on_card else None, told


def apgd(at: Place, make: Callable[[], nn.Module], size: int) -> Found:
    """APGD's images a second in the run's arithmetic, as a share of the matmul rate, and what is no pass of it."""
    network = make().eval().requires_grad_(False).to(at.device)
    rows, budget = (at.rows, AttackBudget(20, 1, border_restarts=0)) if at.on_card else (8, WARM_UP)
    x = made_up(2 * rows if at.on_card else rows, (3, size, size), at)
    shape = BatchShape.of(rows, at.device)
    y = Judge(network, shape).logits(x).argmax(dim=1)
    engine = margin_engine(
        network, x, threat=ThreatModel("Linf", 0.1 / 255), budget=budget, seed=0, stop_when_broken=True, shape=shape,
        arithmetic=Arithmetic(at.precision),
    )  # fmt: skip
    _, seconds, of_passes = _timed(at, engine, x, y)
    (lane,) = (each for (_, in_float32), each in engine._lanes.items() if not in_float32)
    n_rows = engine.tracks.taken[:, [not phase.in_float32 for phase in engine.plan], 1].sum() + lane.n_padding
    share = float(n_rows) / seconds["apgd"] / _limit(at, network, x)
    bookkeeping = 1 - of_passes["apgd"] / seconds["apgd"]
    told = (
        f"{float(n_rows) / seconds['apgd']:.3g} rows/s, {share:.0%} of the matmul rate; bookkeeping {bookkeeping:.0%}"
    )
    return (share >= _LEAST_SHARE and bookkeeping < _MOST_BOOKKEEPING) if at.on_card else None, told


def _timed(at: Place, engine: Engine, x: Tensor, y: Tensor) -> tuple[float, dict[str, float], dict[str, float]]:
    """(seconds of the engine, of the judge and of each lane, of their passes alone)."""
    seconds: dict[str, float] = {}
    of_passes: dict[str, float] = {}

    def timed(act: Act, name: str, kept: dict[str, float]) -> Act:
        def acting(*given: Any) -> Any:
            _wait(at)
            started = time.perf_counter()
            result = act(*given)
            _wait(at)
            kept[name] = kept.get(name, 0.0) + time.perf_counter() - started
            return result

        return acting

    def around(act: Act, name: str, lane: Lane | None) -> Act:
        passing: Any = engine.judge if lane is None else lane
        passing._pass = timed(passing._pass, name, of_passes)
        return timed(act, name, seconds)

    watch(engine, around)
    started = time.perf_counter()
    engine.run_one(Group(x, y, range(len(y))))
    return time.perf_counter() - started, seconds, of_passes


def _wait(at: Place) -> None:
    if at.on_card:
        torch.cuda.synchronize(at.device)


def timm_network(name: str) -> nn.Module:
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = timm.create_model(name, pretrained=False)
    return network

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
from ..acceleration.batch_shape import BatchShape, fastest_of_three, repeated
from ..acceleration.gradient_copy import input_gradient
from ..attacks.adaptive import autoattack, ensemble_engine
from ..attacks.budget import STANDARD_ATTACKS
from ..attacks.engine import Group
from ..attacks.judge import Judge
from ..attacks.published import pyautoattack_images
from .gpu_checks import WARM_UP, Found, Place, made_up

_LEAST_SPEEDUP, _LEAST_SHARE, _MOST_FLOAT32 = 4.0, 0.4, 0.25  # what is aimed at on a card


def rate(at: Place, make: Callable[[], nn.Module], size: int) -> Found:
    """Images a second of forward and backward in bfloat16, as a share of the rate of a matrix product."""
    network = make().eval().requires_grad_(False).to(at.device)
    x = made_up(8, (3, size, size), at)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(x[:1])
    flops = 2 * counter.get_total_flops()  # the gradient of a frozen network by its images costs about one forward more
    made = Arithmetic("bf16").network_copy(network, x, 64).made
    per_second = {}
    for rows in (64, 128, 256, 512) if at.on_card else (4, 8):
        batch = repeated(x, rows)
        try:
            per_second[rows] = rows / fastest_of_three(partial(_both_ways, made, batch))
        except torch.OutOfMemoryError:
            break
    matrix = torch.ones(at.matmul_size, at.matmul_size, device=at.device, dtype=torch.bfloat16)
    limit = 2 * at.matmul_size**3 / fastest_of_three(lambda: matrix @ matrix) / flops
    best = max(per_second, key=lambda rows: per_second[rows])
    share = per_second[best] / limit
    told = ", ".join(f"{rate:.3g} at {rows}" for rows, rate in per_second.items())
    return share >= _LEAST_SHARE if at.on_card else None, f"images/s: {told} rows; {share:.0%} of the matmul rate"


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
    """Seconds of each lane's passes and of the judge's; the share of float32 among them."""
    attacked, shape = at.attacked, BatchShape.of(at.rows, at.device)
    engine = ensemble_engine(
        attacked.network, attacked.x, threat=at.threat, attacks=STANDARD_ATTACKS, budget=at.budget, shape=shape,
        arithmetic=Arithmetic("bf16"),
    )  # fmt: skip
    seconds: dict[str, float] = {}

    def timed(act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def acting(*given: Any) -> Any:
            _wait(at)
            started = time.perf_counter()
            result = act(*given)
            _wait(at)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return acting

    engine.judge.verdicts = timed(engine.judge.verdicts, "judge, float32")  # type: ignore[method-assign]
    make = engine._lane

    def lane(phase: Any) -> Any:
        made = make(phase)
        if "step" not in vars(made):
            name = f"{type(phase.stepper).__name__.lower()}{', float32' * phase.in_float32}"
            made.step = timed(made.step, name)  # type: ignore[method-assign]
        return made

    engine._lane = lane  # type: ignore[method-assign]
    started = time.perf_counter()
    engine.run_one(Group(attacked.x, attacked.y, range(len(attacked.y))))
    whole = time.perf_counter() - started
    share = sum(each for name, each in seconds.items() if "float32" in name) / whole
    told = ", ".join(f"{name} {each:.2g} s" for name, each in sorted(seconds.items(), key=lambda item: -item[1]))
    return share < _MOST_FLOAT32 if at.on_card else None, f"float32 {share:.0%} of {whole:.3g} s; {told}"


def _wait(at: Place) -> None:
    if at.on_card:
        torch.cuda.synchronize(at.device)


def timm_network(name: str) -> nn.Module:
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: nn.Module = timm.create_model(name, pretrained=False)
    return network

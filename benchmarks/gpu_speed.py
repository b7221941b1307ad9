"""Compare the speed of passes with that of matrix products, and of attacks with pyautoattack's.

`benchmarks/gpu.py` runs these steps.

Shapes: B images of C x H x W.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_checks import WARM_UP, Found, Place, made_up
from mixednuts_dist.acceleration.batch_shape import BatchShape, fastest_of_three, repeated
from mixednuts_dist.acceleration.gradient_copy import input_gradient
from mixednuts_dist.acceleration.precision import FastCopies
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import STANDARD_ATTACKS
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.stages.published import pyautoattack_images

# The targets on a GPU.
_LEAST_SPEEDUP, LEAST_SHARE = 4.0, 0.4


def rate(at: Place, make: Callable[[], nn.Module], size: int, least: float = 0.0) -> Found:
    """Measure images per second, forward and backward, as a share of the matrix product's rate.

    On a GPU, passes are in bfloat16, and the best number of rows is measured with compiled passes too. The check fails
    if the share without compilation is below `least`.
    """
    network = make().eval().requires_grad_(False).to(at.device)
    x = made_up(8, (3, size, size), at)
    made = FastCopies(at.precision).of_network(network, x, 64).fast
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
    told = f"images/s: {told} rows; {share:.0%} of the matmul rate"
    if not at.on_card:
        return None, told
    compiled, batch = FastCopies(at.precision, compile=True).of_network(network, x, 64).fast, repeated(x, best)

    def both_ways() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return _both_ways(compiled, batch)

    per_second_compiled = best / fastest_of_three(both_ways)
    torch.compiler.reset()  # graphs hold memory
    return share >= least, f"{told}; compiled {per_second_compiled:.3g} at {best}, {per_second_compiled / limit:.0%}"


def _limit(at: Place, network: nn.Module, x: Tensor) -> float:
    """Return images per second, forward and backward, at the rate of a matrix product in the device's precision."""
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
    """Check that attacks here leave no more images robust than pyautoattack's, and that AutoAttack is faster."""
    attacked = at.attacked
    copies, seconds, standing = FastCopies("auto"), {}, {}
    settings: dict[str, Any] = {"threat": at.threat, "budget": at.budget, "attacks": attacks, "batch_size": at.rows}
    autoattack(attacked.network, attacked.x, attacked.y, precision=copies, **{**settings, "budget": WARM_UP})
    for name, strict in (("TF32 as torch has it", False), ("TF32 off", True)):
        started = time.perf_counter()
        x_adv, _, _ = pyautoattack_images(attacked.network, attacked.x, attacked.y, seed=0, strict=strict, **settings)
        standing[name] = int((Verifier(attacked.network, BatchShape(64)).logits(x_adv).argmax(1) == attacked.y).sum())
        seconds[name] = time.perf_counter() - started
    started = time.perf_counter()
    robust = autoattack(attacked.network, attacked.x, attacked.y, precision=copies, **settings).robust
    ours = time.perf_counter() - started
    told = ", ".join(f"{theirs / ours:.2f} times ({name})" for name, theirs in seconds.items())
    ok = int(robust.sum()) <= min(standing.values()) + 1
    fast = not at.on_card or attacks != STANDARD_ATTACKS or seconds["TF32 off"] / ours >= _LEAST_SPEEDUP
    return ok and fast, f"{told}; {int(robust.sum())} robust, pyautoattack {', '.join(map(str, standing.values()))}"


def timm_network(name: str) -> nn.Module:
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = timm.create_model(name, pretrained=False)
    return network

"""Check that a device computes what the package relies on; `benchmarks/gpu.py` runs these steps.

Shapes: B images of C x H x W.
"""

import multiprocessing
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_networks import colored_noise, resnet18
from mixednuts_dist.acceleration.batch_shape import BatchShape, repeated
from mixednuts_dist.acceleration.gradient_copy import folded
from mixednuts_dist.acceleration.precision import PrecisionChoice
from mixednuts_dist.acceleration.tf32 import tf32_allowed
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import AttackedModel, repeats_its_bits
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.benchmarks.attack_benchmark import PUBLISHED_BUDGET, Subject, subject
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.distributed.gpus import keep_to_share, nvidia_driver
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform

WARM_UP = AttackBudget(1, 1, 1, 0, 0)
_AGREES = 1e-4  # tolerance between the float32 verification and float64, relative to the largest logit

Found = tuple[bool | None, str]  # whether the check passed (None if it does not apply), and the number


@dataclass(frozen=True)
class Place:
    """The device with the sizes for it: real ones on a GPU, and ones that take about a minute on a CPU."""

    device: torch.device

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_card else "CPU"

    @property
    def rows(self) -> int:
        return 256 if self.on_card else 32

    @property
    def budget(self) -> AttackBudget:
        return PUBLISHED_BUDGET if self.on_card else AttackBudget(5, 2, 20, 0, 0)

    @property
    def precision(self) -> PrecisionChoice:
        return "bf16" if self.on_card else "fp32"

    @property
    def matmul_size(self) -> int:
        return 8192 if self.on_card else 512

    @cached_property
    def attacked(self) -> Subject:
        """A trained network and images that it classifies correctly; on a GPU, noise that the network has labeled.

        At its radius, about half of the images remain robust, as on robust classifiers at 8/255.
        """
        if not self.on_card:
            return subject("demo:rob", "digits", 0.1, 24, self.device)
        network, x = resnet18().eval().requires_grad_(False).to(self.device), colored_noise(512).to(self.device)
        return Subject(network, x, network(x).argmax(dim=1), 0.75 / 255)

    @cached_property
    def mixed(self) -> MixedClassifier:
        """The network mixed with itself on mirrored images."""

        class Mirrored(nn.Module):
            def __init__(self, network: nn.Module) -> None:
                super().__init__()
                self.network = network

            def forward(self, x_BCHW: Tensor) -> Tensor:
                logits_BK: Tensor = self.network(x_BCHW.flip(3))
                return logits_BK

        network = self.attacked.network
        made = MixedClassifier(Mirrored(network), network, LogitTransform(1.5, 1.2, 0.0), 0.7, surrogate_alpha=0.8)
        return made.eval().to(self.device)

    @property
    def threat(self) -> ThreatModel:
        return ThreatModel("Linf", self.attacked.eps)


def driver(at: Place) -> Found:
    """Check that the device computes a matrix product, and report the versions of driver and torch."""
    driver, cuda = nvidia_driver() or "none", torch.version.cuda or "none"
    ones = torch.ones(64, 64, device=at.device)
    return bool((ones @ ones == 64).all()), f"driver {driver}, torch {torch.__version__} for CUDA {cuda}, {at.name}"


def flags(at: Place) -> Found:
    """Check that convolutions have float32 precision without TF32, and that the flags are restored."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, generator=generator) for size in ((8, 64, 16, 16), (64, 64, 3, 3)))
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    before, errors = torch.get_float32_matmul_precision(), []
    for allowed in (False, True):
        with tf32_allowed(allowed):
            found = torch.nn.functional.conv2d(x.to(at.device), w.to(at.device)).cpu()
        errors.append(float((found - exact).abs().max() / exact.abs().max()))
    ok = errors[0] < 1e-5 and torch.get_float32_matmul_precision() == before
    return ok, f"relative error {errors[0]:.1e} strict, {errors[1]:.1e} with TF32"


def folding(at: Place) -> Found:
    """Check that batch normalization can be folded into the convolutions."""
    network = resnet18().eval().requires_grad_(False).to(at.device)
    x = made_up(16, (3, 32, 32), at)
    made = folded(network, x)
    with tf32_allowed(False), torch.no_grad():
        deviation = float((made(x) - network(x)).abs().max() / network(x).abs().max())
    return made is not network, f"batch normalization folded, logits changed by {deviation:.1e}"


def repeated_bits(at: Place) -> Found:
    """Check that repeated passes give the same bits in float32 and in bfloat16."""
    precisions: list[PrecisionChoice] = ["fp32", "bf16"]
    model, x = at.attacked.network, at.attacked.x
    same = [precision for precision in precisions if repeats_its_bits(model, x, at.rows, precision)]
    return len(same) == len(precisions), f"passes repeat their bits in {', '.join(same) or 'no precision'}"


def verification(at: Place) -> Found:
    """Check that the float32 verification agrees with float64."""
    model, x = at.attacked.network, at.attacked.x
    found = Verifier(model, BatchShape.of(at.rows, at.device)).logits(x).cpu()
    with torch.no_grad():
        exact = model.cpu().double()(x.cpu().double())
    model.float().to(at.device)
    deviation = float((found - exact).abs().max() / exact.abs().max())
    flips = int((found.argmax(dim=1) != exact.argmax(dim=1)).sum())
    return deviation < _AGREES and not flips, f"differs by {deviation:.1e} of the largest logit, in {flips} classes"


def memory(at: Place) -> Found:
    """Check that an attack that runs out of memory continues with fewer rows and has the same results."""
    attacked, shape = at.attacked, BatchShape(at.rows, float32_rows=at.rows)
    budget = replace(at.budget, n_iter=5)
    expected = _robust(at, autoattack, BatchShape.of(at.rows, at.device), budget, ("apgd-ce",))
    ballast = _ballast(at)
    network, room = attacked.network, at.rows // 3

    class Short(nn.Module):
        def forward(self, x_BCHW: Tensor) -> Tensor:
            if len(x_BCHW) > room:
                raise torch.OutOfMemoryError("chosen")
            logits_BK: Tensor = network(x_BCHW)
            return logits_BK

    model = network if at.on_card else Short().eval()
    found = _robust(at, autoattack, shape, budget, ("apgd-ce",), model)
    del ballast
    differ = int((found != expected).sum())
    return shape.rows < at.rows and differ <= 1, f"{at.rows} rows became {shape.rows}, {differ} results changed"


def _ballast(at: Place) -> Tensor:
    """Occupy all memory of the GPU except for about an eighth of the rows."""
    if not at.on_card:
        return torch.zeros(0)
    before, _ = torch.cuda.mem_get_info()
    AttackedModel.of(at.attacked.network).fast.probe(repeated(at.attacked.x, at.rows))
    needed = before - torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    return torch.empty(max(0, torch.cuda.mem_get_info()[0] - needed // 2), dtype=torch.uint8, device=at.device)


def orders(at: Place) -> Found:
    """Check that results of the joint attack depend neither on order nor on batch composition."""
    x, n = at.attacked.x, len(at.attacked.y)
    with torch.no_grad():
        y = at.mixed(x).argmax(dim=1)
    found = []
    for seed in range(3):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(n)
        outcome = autoattack(
            at.mixed, x[order], y[order], threat=at.threat, attacks=("apgd-ce", "apgd-t"), batch_size=at.rows,
            budget=replace(at.budget, joint_starts=2), sample_ids=order.tolist(), precision="bf16",
        )  # fmt: skip
        found.append(outcome.x_adv[order.argsort()].cpu())
    moved = sum(int((each != found[0]).flatten(1).any(dim=1).sum()) for each in found[1:])
    return not moved, f"{moved} of {2 * n} adversarial images have other bits in another order"


def two_workers(at: Place) -> Found:
    """Check that two processes, each with half of the device, produce the results of one."""
    here = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    with here.Pool(2) as pool:
        found = pool.map(_half, [at.device.type] * 2)
    seconds = time.perf_counter() - started
    same = found[0] == found[1] == _half(at.device.type, 1.0)
    return same, f"{'the same' if same else 'other'} results as one process, in {seconds:.0f} s with their start"


def _half(device: str, share: float = 0.5) -> list[bool]:
    at = Place(torch.device(device))
    if at.on_card:
        keep_to_share(share)
    robust: list[bool] = _robust(at, autoattack, BatchShape.of(64, at.device), WARM_UP, ("apgd-ce",)).tolist()
    return robust


def _robust(
    at: Place, attack: Any, shape: BatchShape, budget: AttackBudget, attacks: tuple[str, ...], model: Any = None
) -> Tensor:
    robust: Tensor = attack(
        model or at.attacked.network, at.attacked.x, at.attacked.y, threat=at.threat, attacks=attacks, budget=budget,
        batch_size=shape, precision="fp32",
    ).robust.cpu()  # fmt: skip
    return robust


def made_up(n: int, shape: tuple[int, int, int], at: Place) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0)).to(at.device)

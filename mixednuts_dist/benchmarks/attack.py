"""Attacks here beside pyautoattack's: same classifier, images, radius, iterations, threads and process.

Run: `mixednuts benchmark attack` for APGD-CE + APGD-T, with `--whole` for standard AutoAttack, attack by attack. With a
GPU in the machine it takes a WRN-70-16 and the GPU, else a ResNet-18 and the CPU. The contestants take turns, so that
other load on the machine meets all of them. Compiling and choosing copies is timed apart.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.arithmetic import Arithmetic, PrecisionChoice
from ..acceleration.gradient_copy import folded
from ..acceleration.tf32 import tf32_allowed
from ..attacks.adaptive import adaptive_autoattack, autoattack
from ..attacks.budget import STANDARD_ATTACKS, AttackBudget
from ..attacks.losses import ce_loss
from ..attacks.minimum_margin import MinimumMarginResult, minimum_margin_attack
from ..attacks.outcome import AttackOutcome
from ..attacks.published import pyautoattack_images
from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from .attack_subjects import Subject, subject

PUBLISHED_BUDGET = AttackBudget(border_restarts=0, joint_starts=0)
QUICK_BUDGET = AttackBudget(50, 4, border_restarts=0, joint_starts=0)
_WARM_UP = AttackBudget(2, 1, 1, border_restarts=0, joint_starts=0)
_RATE_PASSES = 3
_APGD = ("apgd-ce", "apgd-t")
_PUBLISHED = "pyautoattack"
_EXACT = "eager fp32"  # walks the published path
_HERE: list[tuple[str, PrecisionChoice | None, bool]] = [
    (_EXACT, None, False),
    ("fp32", "fp32", False),
    ("bf16", "bf16", False),
    ("bf16 compiled", "bf16", True),
]


@dataclass
class Contestant:
    """One side of a comparison, and its rounds."""

    attack: Callable[[], Any]  # -> an outcome with `n_forward` and `n_backward`, or what `stands` takes
    stands: Callable[[Any], Tensor]  # of an outcome: which images are left, bool
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    outcome: Any = None  # of the last round
    standing: set[int] = field(default_factory=set)  # images that no round has broken: starts of pyautoattack differ

    def take_turn(self, name: str) -> None:
        """One round."""
        _wait()
        wall, cpu = time.perf_counter(), time.process_time()
        self.outcome = self.attack()
        _wait()
        left = set(self.stands(self.outcome).nonzero().squeeze(1).tolist())
        self.standing = self.standing & left if self.wall_s else left
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        say(f"{name}: {self.wall_s[-1]:.1f} s, {self.cpu_s[-1]:.1f} of CPU time, {len(left)} stand")

    def beside(self, theirs: "Contestant", name: str) -> dict[str, Any]:
        """Times as ratios to pyautoattack's, above 1 where this side is faster, and the images that differ."""
        ratios, cpu_ratios = (
            [other / mine for mine, other in zip(*both, strict=True)]
            for both in ((self.wall_s, theirs.wall_s), (self.cpu_s, theirs.cpu_s))
        )
        lost, gained = sorted(self.standing - theirs.standing), sorted(theirs.standing - self.standing)
        result = {
            "seconds": self.wall_s, "ratios": ratios, "cpu_time_ratios": cpu_ratios,
            "ratio_min": min(ratios), "ratio_median": statistics.median(ratios),
            "cpu_time_ratio_min": min(cpu_ratios), "cpu_time_ratio_median": statistics.median(cpu_ratios),
            "robust": len(self.standing), "broken_by_pyautoattack_only": lost, "broken_here_only": gained,
            "n_forward": self.outcome.n_forward, "n_backward": self.outcome.n_backward,
        }  # fmt: skip
        say(
            f"{name}: {result['ratio_median']:.2f} times as fast as pyautoattack (at least {min(ratios):.2f}; in CPU "
            f"time {result['cpu_time_ratio_median']:.2f}); {len(self.standing)} robust; broken by pyautoattack only: "
            f"{lost}, here only: {gained}"
        )
        return result


def run(
    *,
    data: str | None = None,
    model: str | None = None,
    eps: float | None = None,
    n_images: int = 64,
    rounds: int = 2,
    compile: bool = False,
    published: bool = False,
) -> dict[str, Any]:
    """APGD-CE + APGD-T. Prints what it finds line by line and returns the numbers.

    `published` takes the published budgets, four and a half times the work.
    """
    budget = PUBLISHED_BUDGET if published else QUICK_BUDGET
    attacked, where = _subject(model, data, n_images, eps)
    say(f"{attacked.description}; {where}; {budget.n_iter} iterations, {budget.n_target_classes} targets")
    arithmetics, warm_up = _warmed_up(attacked, compile or attacked.x.is_cuda)
    rates = _pass_rates(attacked, arithmetics)
    theirs = _theirs(attacked, _APGD, budget)
    ours = {
        name: Contestant(partial(_margins, attacked, arithmetic, budget), lambda found: ~found.broken)
        for name, arithmetic in arithmetics.items()
    }
    compared = _in_turn(theirs, ours, rounds)
    exact = ours[_EXACT].outcome
    for name, one in ours.items():
        stand = ~exact.broken & ~one.outcome.broken  # where a broken image stops is the luck of its first success
        compared[name]["mean_margin_of_the_robust"] = float(one.outcome.margin[stand].mean())
        difference = compared[name]["mean_margin_minus_eager_fp32"] = float(
            (one.outcome.margin - exact.margin)[stand].mean()
        )
        say(f"{name}: mean margin {difference:+.5f} against eager float32 where both stand")
    return {
        "subject": attacked.description, "device": where, "iterations": budget.n_iter,
        "targets": budget.n_target_classes, "warm_up_s": warm_up, "passes_per_s": rates, **compared,
    }  # fmt: skip


def run_whole(
    *, data: str | None = None, model: str | None = None, eps: float | None = None, n_images: int = 40, rounds: int = 1
) -> dict[str, Any]:
    """Whole standard AutoAttack with the published budgets, each side in one call, in turn.

    A mixture (the URI of a function that returns a `MixedClassifier`) is given to pyautoattack as `as_bypass()`, and is
    attacked here without the joint attack and with it. CPU time is less troubled by other load than the clock.
    """
    attacked, where = _subject(model or "resnet-18", data, n_images, eps)
    say(f"{attacked.description}; {where}; standard AutoAttack")
    arithmetic, budgets = Arithmetic("auto"), {"here": PUBLISHED_BUDGET}
    if isinstance(attacked.network, MixedClassifier):
        starts = AttackBudget().joint_starts
        budgets["here with the joint attack"] = replace(PUBLISHED_BUDGET, joint_starts=starts)
    _theirs(attacked, STANDARD_ATTACKS, _WARM_UP).attack()
    _ours(attacked, arithmetic, _WARM_UP)  # copies are made and tried before the clock runs
    ours = {
        name: Contestant(partial(_ours, attacked, arithmetic, budget), lambda outcome: outcome.robust)
        for name, budget in budgets.items()
    }
    compared = _in_turn(_theirs(attacked, STANDARD_ATTACKS, PUBLISHED_BUDGET), ours, rounds)
    for name, one in ours.items():
        survived = {attack: int(stands.sum()) for attack, stands in one.outcome.survived.items()}
        compared[name]["survived"] = survived
        say(f"{name}: {survived}")
    return {"subject": attacked.description, "device": where, **compared}


def _in_turn(theirs: Contestant, ours: dict[str, Contestant], rounds: int) -> dict[str, dict[str, Any]]:
    """All rounds; what each of ours is beside pyautoattack, by name."""
    for _ in range(rounds):
        for name, one in {_PUBLISHED: theirs, **ours}.items():
            one.take_turn(name)
    return {
        _PUBLISHED: {"seconds": theirs.wall_s, "robust": len(theirs.standing)},
        **{name: one.beside(theirs, name) for name, one in ours.items()},
    }


def _subject(model: str | None, data: str | None, n_images: int, eps: float | None) -> tuple[Subject, str]:
    """What is attacked, and where."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return subject(model or ("wrn-70-16" if on_gpu else "resnet-18"), data, n_images, device, eps), where


def _warmed_up(attacked: Subject, compile: bool) -> tuple[dict[str, Arithmetic | None], dict[str, float]]:
    """The contestants' arithmetics with their copies made, tried and compiled, and how long that took."""
    _theirs(attacked, _APGD, _WARM_UP).attack()
    arithmetics: dict[str, Arithmetic | None] = {}
    seconds = {}
    for name, precision, compiled in _HERE:
        if compiled and not compile:
            continue
        started = time.perf_counter()
        arithmetics[name] = None if precision is None else Arithmetic(precision, compile=compiled)
        _margins(attacked, arithmetics[name], _WARM_UP)
        seconds[name] = round(time.perf_counter() - started, 1)
    say(f"copies made, tried and warm after {seconds} s")
    return arithmetics, seconds


def _pass_rates(attacked: Subject, arithmetics: dict[str, Arithmetic | None]) -> dict[str, float]:
    """Images a second through one forward and backward of the network alone."""
    networks: dict[str, nn.Module] = {}
    if attacked.x.is_cuda:
        networks["folded, TF32"] = folded(attacked.network, attacked.x[:8])
    for name, arithmetic in arithmetics.items():
        copied = arithmetic.network_copy(attacked.network, attacked.x).made if arithmetic else attacked.network
        networks[name] = copied
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(_RATE_PASSES):
        for name, network in networks.items():
            with tf32_allowed("TF32" in name):
                seconds[name].append(_pass_seconds(network, attacked))
    rates = {name: round(len(attacked.x) / min(found), 1) for name, found in seconds.items()}
    say("images/s, network alone, forward + backward: " + ", ".join(f"{k} {v:g}" for k, v in rates.items()))
    return rates


def _pass_seconds(network: nn.Module, attacked: Subject) -> float:
    x = attacked.x.clone().requires_grad_()
    _wait()
    started = time.perf_counter()
    torch.autograd.grad(ce_loss(network(x), attacked.y).sum(), x)
    _wait()
    return time.perf_counter() - started


def _margins(attacked: Subject, arithmetic: Arithmetic | None, budget: AttackBudget) -> MinimumMarginResult:
    # What is no module is passed as it is, in eager float32.
    model = attacked.network if arithmetic else attacked.network.forward
    found = minimum_margin_attack(
        model, attacked.x, attacked.y, threat=ThreatModel("Linf", attacked.eps),
        n_iter=budget.n_iter, n_target_classes=budget.n_target_classes, border_restarts=0,
        batch_size=_rows(attacked), arithmetic=arithmetic,
    )  # fmt: skip
    _require_whole(found.decided)
    return found


def _rows(attacked: Subject) -> int | None:
    """Of a pass here: all images on a GPU, on a CPU the library's default. pyautoattack is given all at once."""
    return len(attacked.x) if attacked.x.is_cuda else None


def _ours(attacked: Subject, arithmetic: Arithmetic, budget: AttackBudget) -> AttackOutcome:
    return attacked_here(
        attacked.network, attacked.x, attacked.y, threat=ThreatModel("Linf", attacked.eps), budget=budget,
        batch_size=_rows(attacked), arithmetic=arithmetic,
    )  # fmt: skip


def attacked_here(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> AttackOutcome:
    """What `autoattack` leaves; of a mixture the adaptive one, in the mode in which pyautoattack can follow."""
    if isinstance(model, MixedClassifier):
        outcome = adaptive_autoattack(model, x, y, mode="bypass", **options)
    else:
        outcome = autoattack(model, x, y, **options)
    _require_whole(outcome.decided)
    return outcome


def differentiable(model: nn.Module) -> nn.Module:
    """What pyautoattack is given: the classifier, or a mixture with its surrogate's gradient."""
    return model.as_bypass() if isinstance(model, MixedClassifier) else model


def _require_whole(decided: Tensor) -> None:
    """An interrupt that cut an attack short goes on from here: what the attack returned then is no figure."""
    if not bool(decided.all()):
        raise KeyboardInterrupt


def _theirs(attacked: Subject, attacks: Sequence[str], budget: AttackBudget) -> Contestant:
    """pyautoattack, in full float32; one restart."""
    x, y, network = attacked.x, attacked.y, attacked.network

    def attack() -> Tensor:
        x_adv, _, _ = pyautoattack_images(
            differentiable(network), x, y, threat=ThreatModel("Linf", attacked.eps), budget=budget, seed=0,
            batch_size=len(x), attacks=attacks,
        )  # fmt: skip
        with tf32_allowed(False), torch.no_grad():
            stands: Tensor = network(x_adv).argmax(dim=1) == y
            return stands

    return Contestant(attack, lambda stands: stands)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(line: str) -> None:
    """To stderr: stdout carries the JSON."""
    print(line, file=sys.stderr, flush=True)

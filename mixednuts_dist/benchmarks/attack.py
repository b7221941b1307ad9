"""Attacks here beside pyautoattack's: same classifier, images, radius, iterations, threads and process.

Run: `mixednuts benchmark attack` for APGD-CE + APGD-T, with `--whole` for standard AutoAttack, attack by attack. With a
GPU in the machine it takes a WRN-70-16 and the GPU, else a ResNet-18 and the CPU. The contestants take turns, so that
other load on the machine meets all of them. Compiling and choosing copies is timed apart.

In the first round pyautoattack goes before anything here has run. An engine here has the C library keep freed memory,
which makes whatever runs after it in the process faster too, pyautoattack by a fifth on a small network on a CPU.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from ..mixing.classifier import MixedClassifier
from ..threat import ThreatModel
from .attack_subjects import Subject, subject

PUBLISHED_BUDGET = AttackBudget(border_restarts=0, joint_starts=0)
QUICK_BUDGET = AttackBudget(50, 4, border_restarts=0, joint_starts=0)
_WARM_UP = AttackBudget(2, 1, border_restarts=0, joint_starts=0)
_RATE_PASSES = 3
_PUBLISHED = "pyautoattack"
_HERE: list[tuple[str, PrecisionChoice | None, bool]] = [
    ("eager fp32", None, False),
    ("fp32", "fp32", False),
    ("bf16", "bf16", False),
    ("bf16 compiled", "bf16", True),
]


@dataclass
class Timed:
    """One contestant's rounds."""

    wall_s: list[float]
    cpu_s: list[float]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Add the block's times."""
        _wait()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        _wait()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)

    def times_as_fast_as(self, other: "Timed") -> tuple[list[float], list[float]]:
        """Round by round, by the clock and in CPU time."""
        wall = [theirs / mine for mine, theirs in zip(self.wall_s, other.wall_s, strict=True)]
        cpu = [theirs / mine for mine, theirs in zip(self.cpu_s, other.cpu_s, strict=True)]
        return wall, cpu


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
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    attacked = subject(model or ("wrn-70-16" if on_gpu else "resnet-18"), data, n_images, device, eps)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    say(f"{attacked.description}; {where}; {budget.n_iter} iterations, {budget.n_target_classes} targets")
    theirs = Timed([], [])
    _published(attacked, _WARM_UP)
    broken = _timed_published(attacked, budget, theirs)
    arithmetics, warm_up = _warmed_up(attacked, compile or on_gpu)
    rates = _pass_rates(attacked, arithmetics)
    attacks = _side_by_side(attacked, budget, arithmetics, rounds, theirs, broken)
    return {
        "subject": attacked.description, "device": where, "iterations": budget.n_iter,
        "targets": budget.n_target_classes, "warm_up_s": warm_up, "passes_per_s": rates,
        **attacks,
    }  # fmt: skip


def _warmed_up(attacked: Subject, compile: bool) -> tuple[dict[str, Arithmetic | None], dict[str, float]]:
    """The contestants' arithmetics with their copies made, tried and compiled, and how long that took."""
    arithmetics: dict[str, Arithmetic | None] = {}
    seconds = {}
    for name, precision, compiled in _HERE:
        if compiled and not compile:
            continue
        started = time.perf_counter()
        arithmetics[name] = None if precision is None else Arithmetic(precision, compile=compiled)
        _attack(attacked, arithmetics[name], _WARM_UP)
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


def _timed_published(attacked: Subject, budget: AttackBudget, seconds: Timed) -> Tensor:
    with seconds.taken():
        broken = _published(attacked, budget)
    say(f"{_PUBLISHED}: {seconds.wall_s[-1]:.1f} s, {seconds.cpu_s[-1]:.1f} of CPU time")
    return broken


def _side_by_side(
    attacked: Subject,
    budget: AttackBudget,
    arithmetics: dict[str, Arithmetic | None],
    rounds: int,
    theirs: Timed,
    broken: Tensor,
) -> dict[str, Any]:
    """The rounds after pyautoattack's first, which is in `theirs` and broke the images `broken`."""
    timed = {_PUBLISHED: theirs, **{name: Timed([], []) for name in arithmetics}}
    found: dict[str, MinimumMarginResult] = {}
    for number in range(rounds):
        if number:
            broken = _timed_published(attacked, budget, theirs)
        for name, arithmetic in arithmetics.items():
            with timed[name].taken():
                found[name] = _attack(attacked, arithmetic, budget)
            say(f"{name}: {timed[name].wall_s[-1]:.1f} s, {timed[name].cpu_s[-1]:.1f} of CPU time")
    exact = found["eager fp32"]
    return {
        _PUBLISHED: {"seconds": theirs.wall_s, "robust": int((~broken).sum())},
        **{name: _compared(name, ours, exact, broken, timed) for name, ours in found.items()},
    }


def _compared(
    name: str, ours: MinimumMarginResult, exact: MinimumMarginResult, theirs_broken: Tensor, timed: dict[str, Timed]
) -> dict[str, Any]:
    """Times as ratios to pyautoattack's; margins against ours in eager float32, which walks the published path."""
    stand = ~exact.broken & ~ours.broken  # where a broken image stops is the luck of its first success
    ratios, cpu_ratios = timed[name].times_as_fast_as(timed[_PUBLISHED])
    result = {
        "seconds": timed[name].wall_s, "ratios": ratios, "cpu_time_ratios": cpu_ratios,
        "ratio_min": min(ratios), "ratio_median": statistics.median(ratios),
        "cpu_time_ratio_min": min(cpu_ratios), "cpu_time_ratio_median": statistics.median(cpu_ratios),
        "robust": int((~ours.broken).sum()),
        "broken_by_pyautoattack_only": int((theirs_broken & ~ours.broken).sum()),
        "broken_here_only": int((~theirs_broken & ours.broken).sum()),
        "mean_margin_of_the_robust": float(ours.margin[stand].mean()),
        "mean_margin_minus_eager_fp32": float((ours.margin - exact.margin)[stand].mean()),
        "n_forward": ours.n_forward, "n_backward": ours.n_backward,
    }  # fmt: skip
    say(
        f"{name}: {result['ratio_median']:.2f} times as fast as pyautoattack (at least {result['ratio_min']:.2f}; "
        f"in CPU time {result['cpu_time_ratio_median']:.2f}); {result['robust']} robust, broken there only "
        f"{result['broken_by_pyautoattack_only']}, here only {result['broken_here_only']}; mean margin "
        f"{result['mean_margin_minus_eager_fp32']:+.5f} against eager float32 where both stand"
    )
    return result


def _published(attacked: Subject, budget: AttackBudget) -> Tensor:
    """Which images pyautoattack breaks, bool; one restart, full float32."""
    rows = torch.arange(len(attacked.y))
    standing = _standing_theirs(attacked, ("apgd-ce", "apgd-t"), rows, budget)
    return torch.ones_like(attacked.y, dtype=torch.bool).index_fill_(0, standing.to(attacked.y.device), False)


def _attack(attacked: Subject, arithmetic: Arithmetic | None, budget: AttackBudget) -> MinimumMarginResult:
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


def run_whole(
    *, data: str | None = None, model: str | None = None, eps: float | None = None, n_images: int = 40, rounds: int = 1
) -> dict[str, Any]:
    """Whole standard AutoAttack with the published budgets, each side in one call, in turn.

    A mixture (the URI of a function that returns a `MixedClassifier`) is given to pyautoattack as `as_bypass()`, and is
    attacked here without the joint attack and with it.

    Ratios above 1 are in favour of this package. CPU time is less troubled by other load than the clock.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attacked = subject(model or "resnet-18", data, n_images, device, eps)
    say(f"{attacked.description}; standard AutoAttack, {torch.get_num_threads()} threads")
    arithmetic, every = Arithmetic("auto"), torch.arange(len(attacked.y))
    _standing_theirs(attacked, STANDARD_ATTACKS, every, AttackBudget(1, 1, 1, 0))
    budgets = {"here": PUBLISHED_BUDGET}
    if isinstance(attacked.network, MixedClassifier):
        starts = AttackBudget().joint_starts
        budgets["here with the joint attack"] = replace(PUBLISHED_BUDGET, joint_starts=starts)
    timed = {name: Timed([], []) for name in (_PUBLISHED, *budgets)}
    standing: dict[str, set[int]] = {}
    result: dict[str, Any] = {"subject": attacked.description}
    for number in range(rounds):
        with timed[_PUBLISHED].taken():
            left = set(_standing_theirs(attacked, STANDARD_ATTACKS, every, PUBLISHED_BUDGET).tolist())
        standing[_PUBLISHED] = standing.get(_PUBLISHED, left) & left
        say(f"{_PUBLISHED}: {timed[_PUBLISHED].wall_s[-1]:.1f} s, {len(left)} stand")
        if number == 0:
            _ours(attacked, arithmetic, AttackBudget(1, 1, 1, 0))  # copies are made and tried before the clock runs
        for name, budget in budgets.items():
            with timed[name].taken():
                outcome = _ours(attacked, arithmetic, budget)
            standing[name] = set(outcome.robust.nonzero().squeeze(1).tolist())
            survived = {attack: int(stands.sum()) for attack, stands in outcome.survived.items()}
            say(f"{name}: {timed[name].wall_s[-1]:.1f} s, {survived}")
            result[name] = {"survived": survived, "n_forward": outcome.n_forward, "n_backward": outcome.n_backward}
    theirs = standing[_PUBLISHED]  # by luck of the start it may be another image each round; here it is the same
    for name in budgets:
        ratios, cpu_ratios = timed[name].times_as_fast_as(timed[_PUBLISHED])
        lost, gained = sorted(standing[name] - theirs), sorted(theirs - standing[name])
        say(
            f"whole AutoAttack, {name}: {statistics.median(ratios):.2f} times as fast, in CPU time "
            f"{statistics.median(cpu_ratios):.2f}; broken by pyautoattack only: {lost}, here only: {gained}"
        )
        result[name] |= {
            "ratios": ratios, "cpu_time_ratios": cpu_ratios, "seconds": timed[name].wall_s,
            "broken_by_pyautoattack_only": lost, "broken_here_only": gained,
        }  # fmt: skip
    return {**result, "pyautoattack_s": timed[_PUBLISHED].wall_s}


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


def _standing_theirs(attacked: Subject, attacks: Sequence[str], rows: Tensor, budget: AttackBudget) -> Tensor:
    """Which of `rows` pyautoattack leaves standing, in full float32."""
    if not len(rows):
        return rows
    x, y, network = attacked.x[rows], attacked.y[rows], attacked.network
    x_adv, _, _ = pyautoattack_images(
        differentiable(network), x, y, threat=ThreatModel("Linf", attacked.eps), budget=budget, seed=0,
        batch_size=len(x), attacks=attacks,
    )  # fmt: skip
    with tf32_allowed(False), torch.no_grad():
        return rows[(network(x_adv).argmax(dim=1) == y).cpu()]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(line: str) -> None:
    """To stderr: stdout carries the JSON."""
    print(line, file=sys.stderr, flush=True)

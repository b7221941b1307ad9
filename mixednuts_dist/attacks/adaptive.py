"""Adaptive AutoAttack (paper, appendix B.2): the attacks in order, each on what still stands.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..acceleration.arithmetic import Arithmetic
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .apgd import ApgdSchedule
from .engine import Engine, EngineSettings, apgd_plan, begin
from .joint import CLOSING_WEIGHTS, ROB_WEIGHTS, joint_attack
from .minimum_margin import NEAR_BORDER, check_images
from .pgd import pgd_attack
from .projections import random_start
from .published_attacks import PassCount, fab_attack, square_attack
from .slots import Tracks
from .victim import AttackMode, Victim, judged_logits

STANDARD_ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
PGD = "pgd-20"
ATTACKS = (*STANDARD_ATTACKS, PGD)
PGD_ITERATIONS = 20


@dataclass(frozen=True)
class AttackOutcome:
    """What is left of a classifier; every claim is re-evaluated in float32 at the `x_adv` returned."""

    robust: Tensor  # (B,) bool: right on the clean image and after every attack
    survived: dict[str, Tensor]  # attack -> (B,) bool, still right after it and all before it
    x_adv: Tensor  # (B, C, H, W): an image that fools, or for a robust image the smallest margin seen
    logits: Tensor  # (B, K) float32 of the attacked classifier at x_adv
    n_forward: int  # images through all attacks and the re-evaluations
    n_backward: int
    unconfirmed: Tensor  # (B,) bool: fooled once, and right when the same image was judged again


@dataclass(frozen=True)
class AttackBudget:
    """The published budgets; `n_target_classes` is capped to K - 1."""

    n_iter: int = 100
    n_target_classes: int = 9
    n_queries: int = 5000
    batch_size: int = 64
    border_restarts: int = 3  # of the joint attack, on images that the mixture keeps by a hair; 0: the paper's attack


def adaptive_autoattack(
    mixed: MixedClassifier,
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    attacks: Sequence[str] = STANDARD_ATTACKS,
    mode: AttackMode = "transfer",
    seed: int = 0,
    cached_BCHW: Tensor | None = None,
    sample_ids: Sequence[int] | None = None,
    budget: AttackBudget | None = None,
    arithmetic: Arithmetic | None = None,
) -> AttackOutcome:
    """AutoAttack on the mixed classifier with the gradient of its surrogate f_aux (equation 7).

    "apgd-t" ends with the joint attack on the images that stand by a hair (`AttackBudget.border_restarts`). "pgd-20" is
    known beside the four standard attacks: 20 steps of eps / 4 on cross-entropy.

    Args:
        mixed: the classifier that decides what counts as broken.
        x_BCHW: clean images, float32 in [0, 1].
        y_B: labels, int64.
        mode: "transfer" (gradient and loss of f_aux) or "bypass" (loss of f_mix, gradient of f_aux).
        cached_BCHW: attacked images from an earlier stage inside the same balls, tried first as attack "cached".
        sample_ids: key the noise; 0 .. B-1 by default.
        arithmetic: how APGD's gradients are computed; every verdict is the classifier's own in float32.

    Raises:
        InvalidInputError: for an unknown attack or mode, or images that do not fit.
    """
    ensemble = _ensemble(Victim.of_mixed(mixed, mode), x_BCHW, y_B, threat, seed, sample_ids, budget)
    ensemble.mixed = mixed
    if arithmetic is not None:
        ensemble.climbed = Victim.of_mixed(mixed, mode, arithmetic, x_BCHW)
    return ensemble.run_all(attacks, cached_BCHW)


def autoattack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    attacks: Sequence[str] = STANDARD_ATTACKS,
    seed: int = 0,
    sample_ids: Sequence[int] | None = None,
    budget: AttackBudget | None = None,
    arithmetic: Arithmetic | None = None,
) -> AttackOutcome:
    """The same ensemble against one differentiable classifier (images in [0, 1] -> logits)."""
    ensemble = _ensemble(Victim.of(model), x_BCHW, y_B, threat, seed, sample_ids, budget)
    if arithmetic is not None:
        ensemble.climbed = Victim.of(model, arithmetic, x_BCHW)
    return ensemble.run_all(attacks)


def _ensemble(
    victim: Victim,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    seed: int,
    sample_ids: Sequence[int] | None,
    budget: AttackBudget | None,
) -> "_Ensemble":
    check_images(x, y)
    budget = budget or AttackBudget()
    ids = list(range(len(x)) if sample_ids is None else sample_ids)
    tracks, targets_NK = begin(victim, x, y, budget.batch_size)
    return _Ensemble(victim, x, y, ids, threat, seed, budget, targets_NK, tracks)


def check_attacks(attacks: Sequence[str]) -> None:
    """Refuse attacks that nobody knows, before any is run."""
    unknown = [attack for attack in attacks if attack not in ATTACKS]
    if unknown:
        raise InvalidInputError(f"attacks={unknown} are not known; valid attacks: {', '.join(ATTACKS)}")


@dataclass
class _Ensemble:
    victim: Victim
    x: Tensor
    y: Tensor
    sample_ids: list[int]
    threat: ThreatModel
    seed: int
    budget: AttackBudget
    targets_NK: Tensor
    tracks: Tracks
    mixed: MixedClassifier | None = None  # what the joint attack works on
    climbed: Victim | None = None  # the same victim for the engine, its networks faster
    survived: dict[str, Tensor] = field(default_factory=dict)
    count: PassCount = field(default_factory=PassCount)  # of all that does not run on the engine

    def __post_init__(self) -> None:
        self.counted = self.count.watched(self.victim)
        self.clean_margin = self.tracks.margin()

    def run_all(self, attacks: Sequence[str], cached: Tensor | None = None) -> AttackOutcome:
        """Everything that was asked for, in order."""
        check_attacks(attacks)
        if cached is not None:
            self.try_cached(cached)
        for attack in attacks:
            self.run(attack)
            self.survived[attack] = ~self.tracks.broken
        return self.outcome()

    def try_cached(self, cached: Tensor) -> None:
        """One forward on images that an earlier stage found; they can only strengthen the adversary."""
        self._offer(torch.arange(len(self.x), device=self.x.device), cached)
        self.survived["cached"] = ~self.tracks.broken

    def run(self, attack: str) -> None:
        """One attack of the ensemble on the images that still stand."""
        if attack.startswith("apgd"):
            self._apgd(attack)
            if attack == "apgd-t" and self.mixed is not None:
                self._joint(self.mixed)
            return
        for part in self._batches(~self.tracks.broken):
            if attack == PGD:
                self._pgd(part)
            else:
                self._offer(part, self._searched(attack, part))

    def _apgd(self, attack: str) -> None:
        settings = EngineSettings(self.threat, ApgdSchedule(self.budget.n_iter), self.seed, self.budget.batch_size)
        plan = apgd_plan((attack,), self.budget.n_target_classes, self.targets_NK.shape[1])
        given = (self.climbed or self.victim), self.x, self.y, self.sample_ids
        engine = Engine(*given, plan, settings, self.targets_NK, self.tracks)
        engine.run((~self.tracks.broken).nonzero().squeeze(1))

    def _joint(self, mixed: MixedClassifier) -> None:
        """Random starts, then the best points so far, for the images that stand by a hair."""
        for restart in range(self.budget.border_restarts):
            self._joint_round(mixed, ROB_WEIGHTS[restart % len(ROB_WEIGHTS)], restart)
        if self.budget.border_restarts:
            for rob_weight in CLOSING_WEIGHTS:
                self._joint_round(mixed, rob_weight)

    def _joint_round(self, mixed: MixedClassifier, rob_weight: float, restart: int | None = None) -> None:
        """Each image against every target, from random starts or, without `restart`, from its best point."""
        for rank in range(2, self._n_targets() + 2):
            for part in self._batches(self._near_border(mixed)):
                x, start, first_step = self.x[part], self.tracks.x_adv[part], 1.0
                if restart is not None:
                    start, first_step = random_start(x, self._keys(f"joint/{rank}", restart, part), self.threat), 2.0
                joint_attack(
                    mixed, x, self.y[part], self.targets_NK[part, -rank], start, self.threat,
                    n_iter=self.budget.n_iter, rob_weight=rob_weight, first_step=first_step, watch=self._watcher(part),
                )  # fmt: skip
                self.count.n_forward += (self.budget.n_iter + 1) * len(part)
                self.count.n_backward += (self.budget.n_iter + 1) * len(part)

    def _near_border(self, mixed: MixedClassifier) -> Tensor:
        """Standing images that would be within 5 % of their clean margin of the border had std voted against them.

        Std's vote moves the mixture's margin by at most 2 (1 - alpha).
        """
        margin = self.tracks.margin() - 2 * mixed.one_minus_alpha
        return (margin < NEAR_BORDER * self.clean_margin) & ~self.tracks.broken

    def _pgd(self, part: Tensor) -> None:
        pgd_attack(
            self.counted, self.x[part], self.y[part], self.threat,
            n_iter=PGD_ITERATIONS, keys=self._keys(PGD, 0, part), watch=self._watcher(part),
        )  # fmt: skip

    def _searched(self, attack: str, part: Tensor) -> Tensor:
        """The images that FAB-T or Square ends on."""
        x, y, budget = self.x[part], self.y[part], self.budget
        if attack == "fab-t":
            return fab_attack(self.counted, x, y, self.threat, budget.n_iter, self._n_targets())
        ids = [self.sample_ids[i] for i in part.tolist()]
        return square_attack(self.counted, x, y, self.threat, budget.n_queries, self.seed, ids)

    def _n_targets(self) -> int:
        return min(self.budget.n_target_classes, self.targets_NK.shape[1] - 1)

    def _batches(self, chosen: Tensor) -> Sequence[Tensor]:
        examples = chosen.nonzero().squeeze(1)
        return torch.split(examples, self.budget.batch_size) if len(examples) else ()

    def _keys(self, attack: str, restart: int, part: Tensor) -> list[tuple[object, ...]]:
        return [(self.seed, attack, restart, self.sample_ids[i]) for i in part.tolist()]

    def _watcher(self, part: Tensor) -> Callable[[Tensor, Tensor], None]:
        def watch(x_adv: Tensor, logits: Tensor) -> None:
            labels = self.y[part]
            log_gap = log_one_minus_signed_margin(logits, labels)
            self.tracks.offer(part, x_adv, log_gap, logits.argmax(dim=1) != labels)

        return watch

    def _offer(self, examples: Tensor, x_adv: Tensor) -> None:
        """Judge what an attack brings; take it where it fools, or where its margin is the smallest so far."""
        self._watcher(examples)(x_adv, judged_logits(self.counted, x_adv, self.budget.batch_size))

    def outcome(self) -> AttackOutcome:
        """The verdicts, each once more on the stored image: what does not fool there does not count as broken."""
        logits = judged_logits(self.counted, self.tracks.x_adv, self.budget.batch_size)
        robust = logits.argmax(dim=1) == self.y
        return AttackOutcome(
            robust=robust,
            survived={attack: survived | robust for attack, survived in self.survived.items()},
            x_adv=self.tracks.x_adv,
            logits=logits,
            n_forward=self.tracks.n_forward + self.count.n_forward,
            n_backward=self.tracks.n_backward + self.count.n_backward,
            unconfirmed=self.tracks.broken & robust,
        )

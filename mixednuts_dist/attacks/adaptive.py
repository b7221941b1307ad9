"""Adaptive AutoAttack (paper, appendix B.2): four attacks in order, each on what still stands.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .apgd import ApgdSchedule
from .engine import Engine, EngineSettings, Tracks, apgd_plan, begin
from .minimum_margin import check_images
from .published import fab_attack, square_attack
from .victim import AttackMode, Victim, judged_logits

STANDARD_ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")


@dataclass(frozen=True)
class AttackOutcome:
    """What is left of a classifier; every claim is re-evaluated in float32 at the `x_adv` returned."""

    robust: Tensor  # (B,) bool: right on the clean image and after every attack
    survived: dict[str, Tensor]  # attack -> (B,) bool, still right after it and all before it
    x_adv: Tensor  # (B, C, H, W): an image that fools, or for a robust image the smallest margin seen
    logits: Tensor  # (B, K) float32 of the attacked classifier at x_adv
    n_forward: int  # images through the APGD engine and the re-evaluations
    n_backward: int


@dataclass(frozen=True)
class AttackBudget:
    """The published budgets; `n_target_classes` is capped to K - 1."""

    n_iter: int = 100
    n_target_classes: int = 9
    n_queries: int = 5000
    batch_size: int = 64


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
) -> AttackOutcome:
    """AutoAttack on the mixed classifier with the gradient of its surrogate f_aux (equation 7).

    Args:
        mixed: the classifier that decides what counts as broken.
        x_BCHW: clean images, float32 in [0, 1].
        y_B: labels, int64.
        mode: "transfer" (gradient and loss of f_aux) or "bypass" (loss of f_mix, gradient of f_aux).
        cached_BCHW: attacked images from an earlier stage inside the same balls, tried first as attack "cached".
        sample_ids: key the noise; 0 .. B-1 by default.

    Raises:
        InvalidInputError: for an unknown attack or mode, or images that do not fit.
    """
    ensemble = _ensemble(Victim.of_mixed(mixed, mode), x_BCHW, y_B, threat, seed, sample_ids, budget)
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
) -> AttackOutcome:
    """The same ensemble against one differentiable classifier (images in [0, 1] -> logits)."""
    return _ensemble(Victim.of(model), x_BCHW, y_B, threat, seed, sample_ids, budget).run_all(attacks)


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
    unknown = [attack for attack in attacks if attack not in STANDARD_ATTACKS]
    if unknown:
        raise InvalidInputError(f"attacks={unknown} are not known; valid attacks: {', '.join(STANDARD_ATTACKS)}")


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
    survived: dict[str, Tensor] = field(default_factory=dict)

    def run_all(self, attacks: Sequence[str], cached: Tensor | None = None) -> AttackOutcome:
        """Everything that was asked for, in order."""
        check_attacks(attacks)
        if cached is not None:
            self.try_cached(cached)
        for attack in attacks:
            self.run(attack)
        return self.outcome()

    def try_cached(self, cached: Tensor) -> None:
        """One forward on images that an earlier stage found; they can only strengthen the adversary."""
        everyone = torch.arange(len(self.x), device=self.x.device)
        self._offer("cached", everyone, cached)

    def run(self, attack: str) -> None:
        """One attack of the ensemble on the images that still stand."""
        if attack.startswith("apgd"):
            self._apgd(attack)
            self.survived[attack] = ~self.tracks.broken
            return
        standing = (~self.tracks.broken).nonzero().squeeze(1)
        found = [self._search(attack, part) for part in torch.split(standing, self.budget.batch_size)]
        self._offer(attack, standing, torch.cat(found) if found else self.x[standing])

    def _apgd(self, attack: str) -> None:
        settings = EngineSettings(self.threat, ApgdSchedule(self.budget.n_iter), self.seed, self.budget.batch_size)
        plan = apgd_plan((attack,), self.budget.n_target_classes, self.targets_NK.shape[1])
        engine = Engine(self.victim, self.x, self.y, self.sample_ids, plan, settings, self.targets_NK, self.tracks)
        engine.run((~self.tracks.broken).nonzero().squeeze(1))

    def _search(self, attack: str, part: Tensor) -> Tensor:
        """FAB-T or Square on the examples of `part`."""
        x, y = self.x[part], self.y[part]
        if not len(part):
            return x
        if attack == "fab-t":
            n_targets = min(self.budget.n_target_classes, self.targets_NK.shape[1] - 1)
            return fab_attack(self.victim, x, y, self.threat, self.budget.n_iter, n_targets)
        ids = [self.sample_ids[i] for i in part.tolist()]
        return square_attack(self.victim, x, y, self.threat, self.budget.n_queries, self.seed, ids)

    def _offer(self, attack: str, examples: Tensor, x_adv: Tensor) -> None:
        """Judge what an attack brings; take it where it fools, or where its margin is the smallest so far."""
        if len(examples):
            tracks = self.tracks
            logits, labels = judged_logits(self.victim, x_adv, self.budget.batch_size), self.y[examples]
            log_gap = log_one_minus_signed_margin(logits, labels)
            smaller = log_gap > tracks.log_one_minus_margin[examples]
            tracks.x_adv[examples[smaller]] = x_adv[smaller]
            tracks.log_one_minus_margin[examples[smaller]] = log_gap[smaller]
            tracks.broken[examples] |= logits.argmax(dim=1) != labels
            tracks.n_forward += len(examples)
        self.survived[attack] = ~self.tracks.broken

    def outcome(self) -> AttackOutcome:
        """The verdicts, each once more on the stored image: what does not fool there does not count as broken."""
        logits = judged_logits(self.victim, self.tracks.x_adv, self.budget.batch_size)
        robust = logits.argmax(dim=1) == self.y
        return AttackOutcome(
            robust=robust,
            survived={attack: survived | robust for attack, survived in self.survived.items()},
            x_adv=self.tracks.x_adv,
            logits=logits,
            n_forward=self.tracks.n_forward + len(self.x),
            n_backward=self.tracks.n_backward,
        )

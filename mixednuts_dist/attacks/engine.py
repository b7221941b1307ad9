"""The engine: a batch whose slots are independent attacks, each example at its own phase and iteration.

An example walks through a plan of phases (APGD-CE, then APGD-T on one target after the other). The moment that its fate
is known it leaves its slot and the next waiting example takes it, so that no pass is spent on a decided image.

Shapes: N examples, S slots, K classes, images of C x H x W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .apgd import ApgdSchedule, ApgdState, absorb, propose
from .losses import mixed_loss
from .projections import random_start
from .victim import Victim, judged_logits


@dataclass(frozen=True)
class Phase:
    """One APGD run: cross-entropy (`target_rank` 0), or targeted DLR on the class of that rank (2 = runner-up)."""

    name: str  # part of the random start's key
    target_rank: int = 0


def apgd_plan(attacks: Sequence[str], n_target_classes: int, n_classes: int) -> list[Phase]:
    """The phases of "apgd-ce" and "apgd-t"; targets are capped to the K - 1 other classes."""
    targets = range(2, min(n_target_classes, n_classes - 1) + 2)
    phases = {
        "apgd-ce": [Phase("apgd-ce")],
        "apgd-t": [Phase(f"apgd-t/{rank}", rank) for rank in targets],
    }
    return [phase for attack in attacks for phase in phases[attack]]


@dataclass(frozen=True)
class EngineSettings:
    """How to run a plan. `n_slots` moves speed and memory, never the result."""

    threat: ThreatModel
    schedule: ApgdSchedule
    seed: int = 0
    n_slots: int = 64
    stop_when_broken: bool = True


@dataclass
class Tracks:
    """What is remembered of each example across all of its phases."""

    x_adv: Tensor  # where the smallest signed margin was seen so far
    log_one_minus_margin: Tensor  # float64, log(1 - margin) there: the larger, the smaller the margin
    broken: Tensor  # bool
    n_forward: int = 0
    n_backward: int = 0

    def margin(self) -> Tensor:
        """The smallest signed margin so far, float64."""
        return -torch.expm1(self.log_one_minus_margin)


@dataclass
class Engine:
    """Runs `plan` on examples; the outcome is left in `tracks`."""

    victim: Victim
    x: Tensor
    y: Tensor
    sample_ids: Sequence[int]
    plan: Sequence[Phase]
    settings: EngineSettings
    targets_NK: Tensor  # each example's classes by rising clean logit, from which ranks are read
    tracks: Tracks
    restart: int = 0  # part of the random start's key
    _example: Tensor = field(init=False)  # (S,) which example sits in each slot
    _phase: Tensor = field(init=False)  # (S,) where in the plan it is
    _state: ApgdState = field(init=False)

    def run(self, waiting: Tensor) -> None:
        """Until every example of `waiting` has ended its plan or, with `stop_when_broken`, is broken."""
        first, waiting = waiting[: self.settings.n_slots], waiting[self.settings.n_slots :]
        if not self.plan or not len(first):
            return
        self._example, self._phase = first, torch.zeros_like(first)
        self._state = self._started(first, self._phase)
        while len(self._example):
            self._round()
            waiting = self._turn_over(waiting)

    def _started(self, examples: Tensor, phases: Tensor) -> ApgdState:
        keys = [
            (self.settings.seed, self.plan[phase].name, self.restart, self.sample_ids[example])
            for example, phase in zip(examples.tolist(), phases.tolist(), strict=True)
        ]
        x = self.x[examples]
        start = random_start(x, keys, self.settings.threat)
        return ApgdState.start(x, start, self.settings.threat, self.settings.schedule)

    def _slot_targets(self) -> Tensor:
        ranks = torch.tensor([phase.target_rank for phase in self.plan], device=self.x.device)[self._phase]
        column = (self.targets_NK.shape[1] - ranks).clamp(max=self.targets_NK.shape[1] - 1)
        targets = self.targets_NK[self._example, column]
        return torch.where(ranks == 0, -1, targets)

    def _round(self) -> None:
        """One forward and one backward for all slots, then the bookkeeping of each."""
        x_new = propose(self._state, self.settings.threat).requires_grad_()
        labels = self.y[self._example]
        with torch.enable_grad():
            climbed, judged = self.victim.climb_and_judge(x_new)
            loss = mixed_loss(climbed, labels, self._slot_targets())
            (grad,) = torch.autograd.grad(loss.sum(), x_new)
        x_new = x_new.detach()
        absorb(self._state, x_new, loss.detach(), grad, self.settings.schedule)
        self._watch(x_new, judged.detach(), labels)
        self.tracks.n_forward += len(x_new)
        self.tracks.n_backward += len(x_new)

    def _watch(self, x_new: Tensor, judged: Tensor, labels: Tensor) -> None:
        """Keep the arg-min margin of each example over everything that was tried on it."""
        tracks, examples = self.tracks, self._example
        log_gap = log_one_minus_signed_margin(judged, labels)
        smaller = log_gap > tracks.log_one_minus_margin[examples]
        tracks.x_adv[examples[smaller]] = x_new[smaller]
        tracks.log_one_minus_margin[examples[smaller]] = log_gap[smaller]
        tracks.broken[examples] |= judged.argmax(dim=1) != labels

    def _turn_over(self, waiting: Tensor) -> Tensor:
        """Move ended phases on, retire decided examples, admit waiting ones; returns who still waits."""
        phase_over = self._state.iteration > self.settings.schedule.n_iter
        done = phase_over & (self._phase == len(self.plan) - 1)
        if self.settings.stop_when_broken:
            done |= self.tracks.broken[self._example]
        moving = phase_over & ~done
        if not bool((done | moving).any()):
            return waiting
        self._phase = torch.where(moving, self._phase + 1, self._phase)
        free = done.nonzero().squeeze(1)
        admitted, waiting = waiting[: len(free)], waiting[len(free) :]
        seats = free[: len(admitted)]
        self._example, self._phase = self._example.clone(), self._phase.clone()
        self._example[seats], self._phase[seats] = admitted, 0
        fresh = torch.cat([seats, moving.nonzero().squeeze(1)])
        if len(fresh):
            self._state.put(fresh, self._started(self._example[fresh], self._phase[fresh]))
        self._drop(free[len(admitted) :])
        return waiting

    def _drop(self, empty: Tensor) -> None:
        """Close slots that nobody waits for."""
        if not len(empty):
            return
        keep = torch.ones(len(self._example), dtype=torch.bool, device=empty.device)
        keep[empty] = False
        index = keep.nonzero().squeeze(1)
        self._example, self._phase = self._example[index], self._phase[index]
        self._state = self._state.take(index)


def begin(victim: Victim, x: Tensor, y: Tensor, n_slots: int) -> tuple[Tracks, Tensor]:
    """Judge the clean images: the tracks start there, and so does the order of the targets (rising logits, (N, K))."""
    logits = judged_logits(victim, x, n_slots)
    tracks = Tracks(
        x_adv=x.clone(),
        log_one_minus_margin=log_one_minus_signed_margin(logits, y),
        broken=logits.argmax(dim=1) != y,
        n_forward=len(x),
    )
    return tracks, logits.sort(dim=1).indices

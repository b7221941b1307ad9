"""The engine: a batch whose slots are independent attacks, each example at its own phase and iteration.

An example walks through a plan of phases (APGD-CE, then APGD-T on one target after the other). The moment that its fate
is known it leaves its slot and the next waiting example takes it, so that no pass is spent on a decided image. What a
fast copy of the classifier believes counts once the judge confirms it: when an image seems broken, and as a phase ends.

Shapes: N examples, S slots, K classes, images of C x H x W.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..acceleration.arithmetic import tf32_allowed
from ..acceleration.batch_shape import FEWEST_ROWS, padded
from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .apgd import ApgdSchedule, ApgdState, absorb, propose
from .losses import MARGIN, UNTARGETED, LossKind, mixed_loss
from .projections import random_start
from .slots import Slots, Tracks
from .victim import Victim, judged_logits, release_memory

_N_SHAPES = 8  # batch sizes that a compiled network may see

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """One APGD run: which loss, and for targeted DLR the rank of the target (2 = runner-up on the clean image)."""

    name: str  # part of the random start's key
    kind: LossKind = "ce"
    target_rank: int = 0
    first_step: float = 2.0  # in radii


# The margin itself, from the best point so far: what is left to gain in float32 after coarser gradients.
POLISH = Phase("polish", "margin", first_step=1.0)
POLISH_SCHEDULE = ApgdSchedule(n_iter=10)
POLISH_AGAIN, POLISH_ROUNDS = 1e-3, 6  # whose margin fell by more is polished again, so often at most


def apgd_plan(attacks: Sequence[str], n_target_classes: int, n_classes: int) -> list[Phase]:
    """The phases of "apgd-ce" and "apgd-t"; targets are capped to the K - 1 other classes."""
    targets = range(2, min(n_target_classes, n_classes - 1) + 2)
    phases = {
        "apgd-ce": [Phase("apgd-ce")],
        "apgd-t": [Phase(f"apgd-t/{rank}", "dlr", rank) for rank in targets],
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
    _slots: Slots = field(init=False)
    _aside: Slots = field(init=False)  # for which memory was short; resumed where they stopped
    _capacity: int = field(init=False)
    _smallest: int = field(init=False)  # batch size: fewer images are padded, while memory allows
    _pending: tuple[torch.cuda.Event, Tensor, Tensor] | None = field(init=False, default=None)

    def run(self, waiting: Tensor) -> None:
        """Until every example of `waiting` has ended its plan or, with `stop_when_broken`, is broken.

        Raises:
            torch.OutOfMemoryError: where not even one image fits.
        """
        waiting = waiting.cpu()
        if not self.plan or not len(waiting):
            return
        self._attack(waiting)
        if self.victim.finer is not None:
            self._polish(self.victim.finer, waiting)

    def _attack(self, waiting: Tensor) -> None:
        self._capacity, self._smallest = self.settings.n_slots, FEWEST_ROWS
        nobody = waiting[:0]
        self._slots = self._aside = self._started(waiting[:1], torch.zeros(1, dtype=torch.long)).take(nobody)
        with tf32_allowed(self.victim.tf32):
            while len(waiting) or len(self._slots) or len(self._aside):
                waiting = self._fill(waiting)
                if self._round():
                    self._turn_over()

    def _polish(self, finer: Victim, examples: Tensor) -> None:
        """A few float32 steps for everyone whose fate the coarse gradients left open, more where they still help."""
        tracks, settings = self.tracks, replace(self.settings, schedule=POLISH_SCHEDULE)
        engine = Engine(finer, self.x, self.y, self.sample_ids, [POLISH], settings, self.targets_NK, tracks)
        for _ in range(POLISH_ROUNDS):
            if settings.stop_when_broken:
                examples = examples[~tracks.broken[examples].cpu()]
            before = tracks.margin()[examples]
            engine.run(examples)
            examples = examples[(before - tracks.margin()[examples] > POLISH_AGAIN).cpu()]

    def _fill(self, waiting: Tensor) -> Tensor:
        """Seat those set aside, then those who wait, while there is room; returns who still waits."""
        room = self._capacity - len(self._slots)
        resumed = torch.arange(min(room, len(self._aside)))
        admitted, waiting = waiting[: room - len(resumed)], waiting[max(0, room - len(resumed)) :]
        if len(resumed):
            self._slots = Slots.join([self._slots, self._aside.take(resumed)])
            self._aside = self._aside.take(torch.arange(len(resumed), len(self._aside)))
        if len(admitted):
            self._slots = Slots.join([self._slots, self._started(admitted, torch.zeros_like(admitted))])
        return waiting

    def _started(self, examples: Tensor, phases: Tensor) -> Slots:
        plan, settings = [self.plan[phase] for phase in phases.tolist()], self.settings
        x, tracks = self.x[examples], self.tracks
        if plan[0].kind == "margin":
            start = tracks.x_adv[examples]
        else:
            keys = [
                (settings.seed, phase.name, self.restart, self.sample_ids[example])
                for example, phase in zip(examples.tolist(), plan, strict=True)
            ]
            start = random_start(x, keys, settings.threat)
        exact = self.victim.exact
        gap = tracks.log_one_minus_margin[examples]
        return Slots(
            example=examples, phase=phases, left=torch.full_like(phases, settings.schedule.n_iter + 1),
            labels=self.y[examples], targets=self._targets(examples, plan),
            state=ApgdState.start(x, start, settings.threat, settings.schedule, plan[0].first_step),
            x_found=tracks.x_adv[examples] if exact else x,
            # Beliefs are not compared with claims: each phase brings its own best to the judge.
            gap_found=gap if exact else torch.full_like(gap, -torch.inf),
            wrong_found=tracks.broken[examples] & exact,
        )  # fmt: skip

    def _targets(self, examples: Tensor, plan: Sequence[Phase]) -> Tensor:
        n_classes = self.targets_NK.shape[1]
        column = torch.tensor([n_classes - max(phase.target_rank, 1) for phase in plan])
        fixed = torch.tensor([{"ce": UNTARGETED, "dlr": 0, "margin": MARGIN}[phase.kind] for phase in plan])
        return torch.where((fixed < 0).to(self.y.device), fixed.to(self.y.device), self.targets_NK[examples, column])

    def _round(self) -> bool:
        """One forward and one backward for all slots, then the bookkeeping of each; False where memory was short."""
        slots, settings = self._slots, self.settings
        x_new = propose(slots.state, settings.threat)
        outcome = self._climb(x_new)
        if outcome is None:
            self._shrink()
            return False
        loss, grad, judged = outcome
        absorb(slots.state, x_new, loss, grad, settings.schedule)
        wrong = judged.argmax(dim=1) != slots.labels
        slots.watch(x_new, log_one_minus_signed_margin(judged, slots.labels), wrong, settings.stop_when_broken)
        slots.left = slots.left - 1
        self.tracks.n_forward += len(x_new)
        self.tracks.n_backward += len(x_new)
        return True

    def _climb(self, x_new: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """(loss, gradient, the judge's logits as far as the climb can tell), or None where memory was short."""
        slots, n = self._slots, len(x_new)
        try:
            x = padded(x_new, self._shape(n)).detach().requires_grad_()
            with torch.enable_grad():
                climbed, judged = self.victim.climb_and_judge(x)
                kinds = {phase.kind for phase in self.plan}
                loss = mixed_loss(climbed[:n], slots.labels, slots.targets, kinds)
                (grad,) = torch.autograd.grad(loss.sum(), x)
            return loss.detach(), grad[:n].contiguous(), judged[:n].detach()
        except torch.OutOfMemoryError:
            if self._shape(n) == 1:
                raise
            return None

    def _shape(self, n: int) -> int:
        """The batch size in which `n` images are passed: some sizes only where each would be compiled."""
        smallest = self._smallest
        step = max(smallest, -(-self.settings.n_slots // _N_SHAPES)) if self.victim.fixed_shapes else 1
        return max(smallest, min(-(-n // step) * step, self._capacity))

    def _shrink(self) -> None:
        """Halve the batch after it ran out of memory; the slots that are over go on later from where they are."""
        self._capacity = max(1, len(self._slots) // 2)
        self._smallest = min(self._smallest, self._capacity)
        _logger.warning("out of memory with %d images; going on with %d", len(self._slots), self._capacity)
        order = torch.arange(len(self._slots))
        self._aside = Slots.join([self._aside, self._slots.take(order[self._capacity :])])
        self._slots = self._slots.take(order[: self._capacity])
        release_memory()

    def _turn_over(self) -> None:
        """Settle what was found, move ended phases on and retire decided examples."""
        slots = self._slots
        over, suspects = slots.left == 0, self._suspects()
        settled = over | suspects
        if not bool(settled.any()):
            return
        broken = self._settle(settled.nonzero().squeeze(1), suspects)
        leaving = (over & (slots.phase == len(self.plan) - 1)) | broken
        moving = (over & ~leaving).nonzero().squeeze(1)
        # Whom the judge did not find broken goes on; only a smaller margin makes him look again.
        slots.wrong_found = slots.wrong_found & ~(suspects & ~broken).to(slots.wrong_found.device)
        parts = [slots.take((~leaving & ~over).nonzero().squeeze(1))]
        if len(moving):
            parts.append(self._started(slots.example[moving], slots.phase[moving] + 1))
        self._slots = Slots.join(parts)

    def _suspects(self) -> Tensor:
        """(S,) on the host: who leaves if the judge confirms it. An accelerator answers one round late, unasked."""
        slots = self._slots
        if not self.settings.stop_when_broken:
            return torch.zeros(len(slots), dtype=torch.bool)
        if not slots.wrong_found.is_cuda:
            return slots.wrong_found.cpu()
        answer = torch.empty(len(slots), dtype=torch.bool, pin_memory=True)
        answer.copy_(slots.wrong_found, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        before, self._pending = self._pending, (event, answer, slots.example)
        if before is None:
            return torch.zeros(len(slots), dtype=torch.bool)
        before[0].synchronize()
        return torch.isin(slots.example, before[2][before[1]])

    def _settle(self, index: Tensor, suspects: Tensor) -> Tensor:
        """Put what the slots of `index` found on record; returns (S,), on the host, who is broken and may leave."""
        slots = self._slots
        found = slots.take(index)
        log_gap, wrong, broken = found.gap_found, found.wrong_found, suspects.clone()
        if not self.victim.exact:
            judged = judged_logits(self.victim, found.x_found, self._capacity)
            log_gap = log_one_minus_signed_margin(judged, found.labels)
            wrong = judged.argmax(dim=1) != found.labels
            broken[index] = wrong.cpu() & self.settings.stop_when_broken
            self.tracks.n_forward += len(index)
        self.tracks.offer(found.example, found.x_found, log_gap, wrong)
        return broken


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

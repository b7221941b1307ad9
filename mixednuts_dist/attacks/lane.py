"""A lane: slots of one kind of attack that step together, in passes of one fixed shape.

The arrays have as many rows as a pass; they are written in place, and no row moves before many are free. Rows that
nobody sits in hold old values, are passed along as filling, and are never looked at.

Who takes a seat is a run: one phase of the plan for one image. An image's runs are due one after the other; those of a
block (one attack's targets) may begin ahead of their turn, in seats that would be free.

Shapes: S slots (rows of a pass), images of C x H x W, K classes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes
from ..acceleration.gradient_copy import input_gradient
from ..acceleration.tf32 import tf32_allowed
from ..mixing.margins import log_one_minus_signed_margin
from .attack import Arrivals, Attack, Phase, Seen, SlotArrays, copy_rows
from .gradient_model import GradientModel
from .judge import AHEAD, DUE, SEATED, Tracks, is_smaller


@dataclass
class Found(SlotArrays):
    """The best point of each slot in its phase, as far as the passes' arithmetic can tell."""

    x: Tensor  # the clean image, for attacks that leave the ball; otherwise no pixels
    labels: Tensor
    targets: Tensor  # the label where the phase has none
    x_found: Tensor  # where the smallest margin was seen
    log_gap: Tensor  # float64, log(1 - margin) there
    wrong: Tensor  # bool: it fools
    refuted: Tensor  # float64, twice the depth -margin at which the judge found it right after all; -inf before
    ended: Tensor  # bool: its phase is over, or nobody sits here


@dataclass
class Leaving:
    """Slots that leave their seats until the judge has looked at what they found."""

    lane: "Lane"
    rows: Tensor  # of the tracks
    phases: Tensor  # of the plan
    x: Tensor
    ended: Tensor  # bool: the phase is over; the others only seem broken, and go on if they are not
    saved: tuple[dict[str, Tensor], dict[str, Tensor]]  # to go on with


class Lane:
    """Slots of one stepper on one gradient model."""

    def __init__(
        self,
        stepper: Attack,
        model: GradientModel,
        shape: BatchShape,
        passes: Passes,
        tracks: Tracks,
        plan: Sequence[Phase],
        stop_when_broken: bool,
    ) -> None:
        self.stepper, self.model, self.shape, self.tracks, self.plan = stepper, model, shape, tracks, plan
        self._passes, self._stop = passes, stop_when_broken
        self._due: deque[tuple[Tensor, Tensor]] = deque()  # (rows, phases) that begin next
        self._ahead = torch.zeros(0, 2, dtype=torch.long)  # (phase, row) that may begin, the first phases first
        self._resuming: deque[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]] = deque()
        self.rows = torch.zeros(0, dtype=torch.long)  # of the tracks, -1 where nobody sits
        self.phases = torch.zeros(0, dtype=torch.long)  # of the plan
        self.n_images = 0  # whose runs are here
        self.n_seated = 0
        self.n_filling = 0  # rows of passes that nobody sat in
        self._sittings = torch.zeros(0, dtype=torch.long)  # a number of its own for each time that someone sits down
        self._n_sittings = 0
        self._state: SlotArrays | None = None
        self._found: Found | None = None
        self._heard: tuple[torch.cuda.Event, Tensor, Tensor] | None = None  # the flags of the round before

    @property
    def n_ready(self) -> int:
        """Runs in seats or waiting for one."""
        return self.n_seated + len(self._ahead) + sum(len(rows) for rows, *_ in (*self._due, *self._resuming))

    def enter(self, rows: Tensor, first: int, wanted: Tensor) -> None:
        """Images that come to a block, whose first phase is `first`; `wanted` says which of its phases each takes.

        (n, phases of the block) bool, one at least for each image.
        """
        self.n_images += len(rows)
        phases, images = wanted.t().nonzero().unbind(dim=1)
        phases = phases + first
        self.tracks.stage[rows[images], phases] = AHEAD
        ahead = torch.cat([self._ahead, torch.stack([phases, rows[images]], dim=1)])
        self._ahead = ahead[ahead[:, 0].sort(stable=True).indices]
        self.due(rows, first + wanted.int().argmax(dim=1))

    def due(self, rows: Tensor, phases: Tensor) -> None:
        """Runs that begin as soon as there is a seat."""
        self.tracks.stage[rows, phases] = DUE
        self._due.append((rows, phases))
        self._keep_ahead()

    def resume(self, rows: Tensor, phases: Tensor, saved: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        """Runs that go on from where they were."""
        self._resuming.append((rows, phases, *saved))

    def drop(self) -> None:
        """Give up every run whose stage says that nobody needs it any more."""
        stage = self.tracks.stage
        self._keep_ahead()
        due, self._due = self._due, deque()
        for rows, phases in due:
            wanted = stage[rows, phases] == DUE
            self._due.append((rows[wanted], phases[wanted]))
        resuming, self._resuming = self._resuming, deque()
        for rows, phases, state, found in resuming:
            wanted = (stage[rows, phases] == SEATED).nonzero().squeeze(1)
            index = wanted.to(found["labels"].device)
            self.resume(rows[wanted], phases[wanted], (rows_of(state, index), rows_of(found, index)))
        self._empty(((self.rows >= 0) & (stage[self.rows, self.phases] != SEATED)).nonzero().squeeze(1))

    def _keep_ahead(self) -> None:
        """Forget the runs that are no longer to begin ahead of their turn."""
        self._ahead = self._ahead[self.tracks.stage[self._ahead[:, 1], self._ahead[:, 0]] == AHEAD]

    def step(self) -> None:
        """Seat who waits, one pass for all, and the bookkeeping of each; images that memory ends for wait again."""
        self._seat()
        assert self._state is not None and self._found is not None
        x_new, takes_gradient = self.stepper.propose(self._state), self.stepper.takes_gradient
        seen = self._pass(x_new, self._found.labels, self._found.targets)
        if seen is None:
            self.shape.shrink(len(self.rows))
            self._set_aside()
            return
        self._watch(self._found, x_new, seen)
        self._found.ended |= self.stepper.absorb(self._state, x_new, seen)
        rows, phases = self.rows.numpy(), self.phases.numpy()  # a quarter of the time that torch takes
        n_free = len(rows) - self.n_seated
        if n_free:
            self.n_filling += n_free
            rows, phases = rows[rows >= 0], phases[rows >= 0]
        self.tracks.taken.numpy()[rows, phases, : 1 + takes_gradient] += 1

    def _pass(self, x_new: Tensor, labels: Tensor, targets: Tensor) -> Seen | None:
        """One forward and, where the attack takes it, one backward; None where memory was short."""
        try:
            if self.model.compiled:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with tf32_allowed(self.model.tf32):
                if self.stepper.takes_gradient:
                    x_leaf = x_new.detach().requires_grad_()
                    with torch.enable_grad():
                        outputs = self.model.run(x_leaf)
                        objective = self.stepper.objective(self._state, outputs, labels, targets)
                        grad = input_gradient(objective, x_leaf)
                else:
                    objective = grad = x_new.new_zeros(0)
                    with torch.no_grad():
                        outputs = self.model.run(x_new)
                logits = outputs.model_logits.detach().float()
        except torch.OutOfMemoryError:
            if len(x_new) == 1:
                raise
            return None
        log_gap, wrong = log_one_minus_signed_margin(logits, labels), logits.argmax(dim=1) != labels
        return Seen(logits, labels, targets, log_gap, wrong, objective.detach(), grad)

    def _watch(self, found: Found, x_new: Tensor, seen: Seen) -> None:
        """Keep the smallest margin's point; with `stop_when_broken` the first one to be verified stands."""
        better = is_smaller(seen.log_gap, seen.wrong, found.log_gap, found.wrong) & ~found.ended
        if self._stop:
            better &= ~to_be_verified(found.wrong, found.log_gap, found.refuted)
        if not self.stepper.stays_inside:
            better &= self.stepper.setting.ball.contains(x_new, found.x)
        copy_rows(found.x_found, x_new, better)
        torch.where(better, seen.log_gap, found.log_gap, out=found.log_gap)
        torch.where(better, seen.wrong, found.wrong, out=found.wrong)

    # Seats

    def _seat(self) -> None:
        """Give seats to runs that go on, that are due, and ahead of their turn, in the shape that they need."""
        if self.n_seated == len(self.rows) == self.shape.rows:
            return
        if self.n_seated > self.shape.rows:  # memory has ended elsewhere
            self._set_aside()
        self._reshape(self._n_slots(min(self.n_ready, self.shape.rows)))
        assert self._state is not None and self._found is not None
        while self._resuming and (free := self._free_seats()) is not None:
            rows, phases, state, found = self._resuming.popleft()
            n = len(free)
            if n < len(rows):
                self._resuming.appendleft(
                    (rows[n:], phases[n:], rows_of(state, slice(n, None)), rows_of(found, slice(n, None)))
                )
                rows, phases, state, found = rows[:n], phases[:n], rows_of(state, slice(n)), rows_of(found, slice(n))
            slots = free[: len(rows)].to(self._found.labels.device, non_blocking=True)
            self._state.put(slots, state)
            self._found.put(slots, found)
            self._sit(free[: len(rows)], rows, phases)
        while self._due and (free := self._free_seats()) is not None:
            rows, phases = self._due.popleft()
            if len(free) < len(rows):
                self._due.appendleft((rows[len(free) :], phases[len(free) :]))
            self._begin(free[: len(rows)], rows[: len(free)], phases[: len(free)])
        if len(self._ahead) and (free := self._free_seats()) is not None:
            runs, self._ahead = self._ahead[: len(free)], self._ahead[len(free) :]
            self._begin(free[: len(runs)], runs[:, 1], runs[:, 0])

    def _n_slots(self, n_images: int) -> int:
        return self._passes.rows_for(n_images, self.tracks.x[:n_images])

    def _free_seats(self) -> Tensor | None:
        free = (self.rows < 0).nonzero().squeeze(1)
        return free if len(free) else None

    def _begin(self, seats: Tensor, rows: Tensor, places: Tensor) -> None:
        assert self._found is not None
        tracks, device = self.tracks, self._found.labels.device
        slots, there = seats.to(device, non_blocking=True), rows.to(device, non_blocking=True)
        phases = [self.plan[phase] for phase in places.tolist()]
        which = torch.tensor([phase.target for phase in phases])
        picked = tracks.targets[rows, (which - 1).clamp(min=0)] if tracks.targets.shape[1] else tracks.host_labels[rows]
        targets = torch.where(which > 0, picked, tracks.host_labels[rows]).to(device, non_blocking=True)
        names = [
            phase.name.format(rank=int(tracks.ranks[row, phase.target - 1])) if phase.target else phase.name
            for row, phase in zip(rows.tolist(), phases, strict=True)
        ]
        arrivals = Arrivals(
            phases, tracks.x[there], tracks.best[there], tracks.labels[there], targets, names,
            [tracks.sample_ids[row] for row in rows.tolist()],
        )  # fmt: skip
        found = self._found
        if not self.stepper.stays_inside:
            found.x[slots] = arrivals.x
        found.labels[slots], found.targets[slots] = arrivals.labels, targets
        # What passes in other arithmetic have shown is not comparable: each phase brings its own best to the judge.
        found.x_found[slots] = arrivals.x
        found.log_gap[slots] = -torch.inf
        found.wrong[slots] = False
        found.refuted[slots] = -torch.inf
        found.ended[slots] = False
        self.stepper.begin(self._state, slots, arrivals)
        self._sit(seats, rows, places)

    def _sit(self, seats: Tensor, rows: Tensor, phases: Tensor) -> None:
        self.rows[seats], self.phases[seats] = rows, phases
        self.tracks.stage[rows, phases] = SEATED
        self._sittings[seats] = self._n_sittings + torch.arange(len(rows))
        self._n_sittings += len(rows)
        self.n_seated += len(rows)

    def _reshape(self, n_slots: int) -> None:
        """As many slots as the next pass has rows; those who sit move together."""
        if self._state is None or self._found is None:
            like = self.tracks.x[:1].expand(n_slots, *self.tracks.x.shape[1:])
            self._state, self._found = self.stepper.state(like), _nobody(like, pixels=not self.stepper.stays_inside)
            self.rows, self.phases, self._sittings = torch.full((3, n_slots), -1).unbind()
        elif n_slots != len(self.rows):
            self._keep((self.rows >= 0).nonzero().squeeze(1), n_slots)

    def _keep(self, seats: Tensor, n_slots: int) -> None:
        assert self._state is not None and self._found is not None
        slots = seats.to(self._found.labels.device)
        self._state.resize(slots, n_slots)
        self._found.resize(slots, n_slots)
        self._found.ended[len(seats) :] = True
        nobody = torch.full((n_slots - len(seats),), -1)
        self.rows = torch.cat([self.rows[seats], nobody])
        self.phases = torch.cat([self.phases[seats], nobody])
        self._sittings = torch.cat([self._sittings[seats], nobody])
        self.n_seated = len(seats)

    def _set_aside(self) -> None:
        """After memory ran out: those beyond the smaller shape go on later from where they are."""
        assert self._state is not None and self._found is not None
        seats = (self.rows >= 0).nonzero().squeeze(1)
        staying, going = seats[: self.shape.rows], seats[self.shape.rows :]
        if len(going):
            slots = going.to(self._found.labels.device)
            self.resume(self.rows[going], self.phases[going], (self._state.take(slots), self._found.take(slots)))
        self._keep(staying, self.shape.rows)

    # Leaving

    def leaving(self) -> Leaving | None:
        """Who leaves a seat after the round: phases that have ended and, to be verified, images that seem broken."""
        assert self._state is not None and self._found is not None
        found = self._found
        leaves, ended = self._flags()
        seats = torch.from_numpy((leaves.numpy() & (self.rows.numpy() >= 0)).nonzero()[0])
        if not len(seats):
            return None
        slots = seats.to(found.labels.device, non_blocking=True)
        x, rows, phases, ended = found.x_found[slots], self.rows[seats], self.phases[seats], ended[seats]
        going_on = slots[(~ended).to(slots.device)] if bool((~ended).any()) else slots[:0]
        saved = self._state.take(going_on), found.take(going_on)
        # If the judge does not confirm it, only a smaller margin counts, and half as small is worth no second look
        # before the phase ends: an image that leaves its seat after every step falls behind all others.
        saved[1]["wrong"].zero_()
        saved[1]["refuted"] = 2 * saved[1]["log_gap"].expm1().clamp(min=0)
        self._empty(seats)
        return Leaving(self, rows, phases, x, ended, saved)

    def _empty(self, seats: Tensor) -> None:
        """Seats that nobody has any more."""
        if len(seats):
            assert self._found is not None
            self._found.ended[seats.to(self._found.ended.device, non_blocking=True)] = True
            self.rows[seats] = self._sittings[seats] = -1
            self.n_seated -= len(seats)

    def _raised(self) -> Tensor:
        """(2, S) on the device: who leaves, and whose phase has ended."""
        assert self._found is not None
        found = self._found
        leaves = found.ended
        if self._stop:
            leaves = leaves | to_be_verified(found.wrong, found.log_gap, found.refuted)
        return torch.stack([leaves, found.ended])

    def _flags(self) -> Tensor:
        """What was raised, on the host.

        On a GPU the flags are copied asynchronously and read one round later, so that no round waits for them.
        """
        raised = self._raised()
        if not raised.is_cuda:
            return raised
        flags = torch.empty(raised.shape, dtype=raised.dtype, pin_memory=True)
        flags.copy_(raised, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        before, self._heard = self._heard, (event, flags, self._sittings.clone())
        if before is None or len(before[2]) != len(self.rows):
            return torch.zeros(raised.shape, dtype=raised.dtype)
        before[0].synchronize()
        return before[1] * (before[2] == self._sittings)  # who has come to the seat since is answered in the next round


def to_be_verified(wrong: Tensor, log_gap: Tensor, refuted: Tensor) -> Tensor:
    """Which points fool, by more than twice what was refuted before."""
    return wrong & (log_gap.expm1() > refuted)


def _nobody(like: Tensor, *, pixels: bool) -> Found:
    n = len(like)
    return Found(
        x=torch.zeros_like(like, memory_format=torch.contiguous_format) if pixels else like.new_zeros(n, 0),
        labels=torch.zeros(n, dtype=torch.long, device=like.device),
        targets=torch.zeros(n, dtype=torch.long, device=like.device),
        x_found=torch.zeros_like(like, memory_format=torch.contiguous_format),
        log_gap=torch.zeros(n, dtype=torch.float64, device=like.device),
        wrong=torch.zeros(n, dtype=torch.bool, device=like.device),
        refuted=torch.full((n,), -torch.inf, dtype=torch.float64, device=like.device),
        ended=torch.ones(n, dtype=torch.bool, device=like.device),
    )


def rows_of(values: dict[str, Tensor], index: "Tensor | slice") -> dict[str, Tensor]:
    """The same rows of all arrays that `SlotArrays.take` gave."""
    return {name: of_all[index] for name, of_all in values.items()}

"""The lane of random searches: rows that its images leave free hold speculative queries, those that would come next.

Square's next query depends on the present one only if that is kept, one time in 25 on the robust classifiers of the
README. So where S images leave rows of a pass free, an image has several queries in it, all from its best point so far.
They count up to and including the first that is kept or seems to break the image; what comes after is thrown away, and
asked again from the new point. The outcome is the one of a query a pass to the bit, as is the count of its passes.

Shapes: S slots, R >= S rows of a pass, D = R / S rounded up, the most rows that a slot has in it.
"""

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .attack import Seen, SlotArrays, SpeculativeRows, SpeculativeSearch, copy_rows
from .judge import is_smaller
from .lane import Lane, to_be_verified

_KEPT = 1 / 25  # of the queries
# Points an image in a pass; of more than 24 in a row the last ones count less than every third time.
_DEPTHS = (1, 2, 4, 8, 24)
_UNTIMED_DEPTH = 8  # on an accelerator, which a clock would have to wait for: of 8 in a row 7 count
_TIMED = 2  # passes of each number of rows until one is chosen
_SOONEST, _LATEST = 8, 256  # passes until the choice is made anew: twice as many each time


class _Counts(SlotArrays):
    """On the device, because only there it is known at once which rows counted."""

    def __init__(self, n_slots: int, device: torch.device) -> None:
        self.n_counted = torch.zeros(n_slots, dtype=torch.long, device=device)  # since someone sat down


class SpeculativeLane(Lane):
    """As many slots as images, and as many rows as one pass may have or these can use."""

    stepper: SpeculativeSearch
    _layout: SpeculativeRows | None = None
    _counts: _Counts | None = None
    _reported: Tensor  # (S,) of the counts, on the host
    _chosen: tuple[int, int, int] = (0, 0, 0)  # (slots, most rows, rows) of the last choice
    _passes_left = 0  # until the next one
    _next_after = _SOONEST

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seconds: dict[int, deque[float]] = {}  # that the last passes of so many rows took

    def step(self) -> None:
        """As of any lane, with several points a slot."""
        started = time.perf_counter()
        self._seat()
        assert self._state is not None and self._found is not None and self._counts is not None
        layout, found = self._speculative_rows(), self._found
        x_new = self.stepper.propose_speculative(self._state, layout)
        seen = self._pass(x_new, found.labels[layout.slot_R], found.targets[layout.slot_R])
        if seen is None:
            self.shape.shrink(len(x_new))
            self._set_aside()
            return
        last_R = self.stepper.last(self._state, seen, layout)
        closed = found.ended
        if self._stop:
            # The first row that is to be verified by itself is the one after which its slot is: its margin is smaller
            # than what fools none, and than what was refuted.
            last_R |= to_be_verified(seen.wrong, seen.log_gap, found.refuted[layout.slot_R])
            closed = closed | to_be_verified(found.wrong, found.log_gap, found.refuted)
        last_DS = layout.by_depth(last_R, True)
        counted_DS = (last_DS.cumsum(0) - last_DS.long() == 0) & ~closed & layout.by_depth(layout.depth_R >= 0, False)
        n_counted = counted_DS.sum(0)
        self._watch_speculative(x_new, seen, layout, counted_DS, n_counted > 0)
        found.ended |= self.stepper.absorb_speculative(self._state, x_new, seen, n_counted)
        self._counts.n_counted += n_counted
        self.n_filling += len(x_new)  # until those that counted are reported
        self._seconds.setdefault(len(x_new), deque(maxlen=_TIMED)).append(time.perf_counter() - started)

    def _watch_speculative(
        self, x_new: Tensor, seen: Seen, layout: SpeculativeRows, counted_DS: Tensor, some: Tensor
    ) -> None:
        """Keep the smallest margin's point of the rows that counted; of equals the first that fools, else the first."""
        found = self._found
        assert found is not None
        gap_DS, wrong_DS = layout.by_depth(seen.log_gap, -torch.inf), layout.by_depth(seen.wrong, False)
        gap_DS = torch.where(counted_DS & (gap_DS > -torch.inf), gap_DS, -torch.inf)  # NaN is never the smallest
        smallest_DS = (gap_DS == gap_DS.amax(0)) & counted_DS
        row_S = (smallest_DS * (1 + wrong_DS.long())).argmax(0) * layout.n_slots + layout.slot_R[: layout.n_slots]
        log_gap, wrong = seen.log_gap[row_S], seen.wrong[row_S]
        better = is_smaller(log_gap, wrong, found.log_gap, found.wrong) & some
        copy_rows(found.x_found, x_new, better, row_S)
        torch.where(better, log_gap, found.log_gap, out=found.log_gap)
        torch.where(better, wrong, found.wrong, out=found.wrong)

    def _speculative_rows(self) -> SpeculativeRows:
        assert self._found is not None
        n_slots, device = len(self.rows), self._found.labels.device
        rows = self._rows_on_cpu(n_slots) if device.type == "cpu" else self._shape_for(_UNTIMED_DEPTH * n_slots)
        if self._layout is None or (self._layout.n_slots, len(self._layout.slot_R)) != (n_slots, rows):
            self._layout = SpeculativeRows.of(n_slots, rows, device)
        return self._layout

    def _rows_on_cpu(self, n_slots: int) -> int:
        """The rows whose passes, as they were timed, have the most points that count in a second.

        Of a small network many rows take little longer than a few, and of a large one twice as long as half of them.
        What is chosen decides nothing but the time.
        """
        if self._chosen[:2] == (n_slots, self.shape.rows) and self._passes_left:
            self._passes_left -= 1
            return self._chosen[2]
        rates: dict[int, float] = {}
        for depth in _DEPTHS:
            rows = self._shape_for(depth * n_slots)
            seconds = self._seconds.get(rows, ())
            if len(seconds) < _TIMED:
                return rows
            rates[rows] = (1 - (1 - _KEPT) ** (rows / n_slots)) / min(seconds)
        rows = max(rates, key=lambda rows: rates[rows])
        self._chosen, self._passes_left = (n_slots, self.shape.rows, rows), self._next_after
        self._next_after = min(2 * self._next_after, _LATEST)
        for other in rates.keys() - {rows}:
            self._seconds[other].popleft()  # timed once more then: other load may have made it look slow
        return rows

    def _shape_for(self, n_points: int) -> int:
        n_points = min(self.shape.rows, n_points)
        return self._passes.rows_for(n_points, self.tracks.x[:n_points])

    # Seats

    def _n_slots(self, n_images: int) -> int:
        """One for each image; up to an eighth may be empty before those who sit move together."""
        n_slots = len(self.rows)
        enough = n_images <= n_slots < n_images + max(1, n_slots // 8)
        return n_slots if enough and n_slots <= self.shape.rows else n_images

    def _reshape(self, n_slots: int) -> None:
        super()._reshape(n_slots)
        if self._counts is None:
            assert self._found is not None
            self._counts, self._reported = _Counts(n_slots, self._found.labels.device), torch.zeros_like(self.rows)

    def _sit(self, seats: Tensor, rows: Tensor, phases: Tensor) -> None:
        assert self._counts is not None
        super()._sit(seats, rows, phases)
        self._counts.n_counted[seats.to(self._counts.n_counted.device, non_blocking=True)] = 0
        self._reported[seats] = 0

    def _keep(self, seats: Tensor, n_slots: int) -> None:
        assert self._counts is not None
        super()._keep(seats, n_slots)
        self._counts.resize(seats.to(self._counts.n_counted.device), n_slots)
        self._reported = torch.cat([self._reported[seats], torch.zeros(n_slots - len(seats), dtype=torch.long)])

    def _set_aside(self) -> None:
        assert self._counts is not None
        self._report(self._counts.n_counted.cpu())
        super()._set_aside()

    # Leaving

    def _raised(self) -> Tensor:
        assert self._counts is not None
        return torch.cat([super()._raised().long(), self._counts.n_counted[None]])

    def _flags(self) -> Tensor:
        flags = super()._flags()
        self._report(flags[2])
        return flags[:2].bool()

    def _report(self, n_counted: Tensor) -> None:
        """Note which passes counted, as far as the host has heard of it."""
        seated = self.rows >= 0
        more = (n_counted - self._reported).clamp(min=0)[seated]
        self._reported[seated] += more
        self.tracks.taken[self.rows[seated], self.phases[seated], 0] += more
        self.n_filling -= int(more.sum())

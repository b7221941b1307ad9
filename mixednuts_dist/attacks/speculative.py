"""The lane of random searches: rows that its images leave free hold speculative queries, those that would come next.

Square's next query depends on the present one only if that is kept, one time in 25 on the robust classifiers of the
README. So where S images leave rows of a pass free, the pass holds several queries of each image, all from its best
point so far. They count up to and including the first that is kept or seems to break the image. What comes after is
thrown away, and made again from the new point. The outcome has the bits of a query a pass, and so has the count.

Shapes: S slots, R >= S rows of a pass, D = R / S rounded up, the most rows that a slot has in it.
"""

from typing import Any

import torch
from torch import Tensor

from .attack import Seen, SlotArrays, SpeculativeRows, SpeculativeSearch, copy_rows
from .judge import is_smaller
from .lane import Lane, to_verify

# Queries of an image in a pass, at most. Of 16 in a row 12 count. CPU time of Square on 2, 8 and 24 images: with 16
# 0.13, 0.21 and 0.56 s on the digits' rob (8: 0.20, 0.21, 0.54; 1: 0.61, 1.24, 1.34), 0.19, 0.48 and 1.15 s on
# `rob_c10_resnet4b` (8: 0.21, 0.47, 1.18; 1: 0.41, 0.95, 1.66).
_DEPTH = 16


class _Counts(SlotArrays):
    """On the device, because there it is known without waiting which rows counted."""

    def __init__(self, device: torch.device) -> None:
        self.n_counted = torch.zeros(0, dtype=torch.long, device=device)  # since the slot was filled


class SpeculativeLane(Lane):
    """As many slots as images, and as many rows as one pass may have or these can use."""

    stepper: SpeculativeSearch
    _lags = False  # counts come from the device, which stops counting as a flag is raised

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counts = _Counts(self._found.labels.device)
        self._reported = torch.zeros(0, dtype=torch.long)  # (S,) of the counts, on the host
        self._layout = SpeculativeRows.of(1, 1, self._found.labels.device)

    def step(self) -> None:
        """As of any lane, with several points a slot."""
        self._fill()
        layout, found = self._rows_of_pass(), self._found
        x_new = self.stepper.propose_speculative(self._state, layout)
        seen = self._pass(x_new, found.labels[layout.slot_R], found.targets[layout.slot_R])
        if seen is None:
            self._suspend_some(len(x_new))
            return
        last_R = self.stepper.last(self._state, seen, layout)
        closed = found.ended
        if self._stop:
            # The first row that is to be verified by itself is the one after which its slot is: its margin is smaller
            # than that of every point that does not fool, and than what was refuted.
            last_R |= to_verify(seen.wrong, seen.log_gap, found.refuted[layout.slot_R])
            closed = closed | found.to_verify()
        last_DS = layout.by_depth(last_R, True)
        counted_DS = (last_DS.cumsum(0) - last_DS.long() == 0) & ~closed & layout.by_depth(layout.depth_R >= 0, False)
        n_counted = counted_DS.sum(0)
        self._watch_counted(x_new, seen, layout, counted_DS, n_counted > 0)
        found.ended |= self.stepper.absorb_speculative(self._state, x_new, seen, n_counted)
        self._counts.n_counted += n_counted
        self.n_padding += len(x_new)  # until those that counted are reported

    def _watch_counted(
        self, x_new: Tensor, seen: Seen, layout: SpeculativeRows, counted_DS: Tensor, some: Tensor
    ) -> None:
        """Keep the smallest margin's point of the rows that counted; of equals the first that fools, else the first."""
        found = self._found
        gap_DS, wrong_DS = layout.by_depth(seen.log_gap, -torch.inf), layout.by_depth(seen.wrong, False)
        gap_DS = torch.where(counted_DS & (gap_DS > -torch.inf), gap_DS, -torch.inf)  # NaN is never the smallest
        smallest_DS = (gap_DS == gap_DS.amax(0)) & counted_DS
        row_S = (smallest_DS * (1 + wrong_DS.long())).argmax(0) * layout.n_slots + layout.slot_R[: layout.n_slots]
        log_gap, wrong = seen.log_gap[row_S], seen.wrong[row_S]
        better = is_smaller(log_gap, wrong, found.log_gap, found.wrong) & some
        copy_rows(found.x_found, x_new, better, row_S)
        torch.where(better, log_gap, found.log_gap, out=found.log_gap)
        torch.where(better, wrong, found.wrong, out=found.wrong)

    def _rows_of_pass(self) -> SpeculativeRows:
        n_slots = len(self.rows)
        n_rows = super()._n_slots(min(self.passes.shape.rows, _DEPTH * n_slots))
        if (self._layout.n_slots, len(self._layout.slot_R)) != (n_slots, n_rows):
            self._layout = SpeculativeRows.of(n_slots, n_rows, self._found.labels.device)
        return self._layout

    # Slots

    def _n_slots(self, n_attempts: int) -> int:
        """One for each image; up to an eighth may be free before those that are held move together."""
        n_slots = len(self.rows)
        enough = n_attempts <= n_slots < n_attempts + max(1, n_slots // 8)
        return n_slots if enough and n_slots <= self.passes.shape.rows else n_attempts

    def _hold(self, slots: Tensor, rows: Tensor, phases: Tensor) -> None:
        super()._hold(slots, rows, phases)
        self._counts.n_counted[slots.to(self._counts.n_counted.device, non_blocking=True)] = 0
        self._reported[slots] = 0

    def _keep(self, slots: Tensor, n_slots: int) -> None:
        super()._keep(slots, n_slots)
        self._counts.resize(slots.to(self._counts.n_counted.device, non_blocking=True), n_slots)
        self._reported = torch.cat([self._reported[slots], torch.zeros(n_slots - len(slots), dtype=torch.long)])

    def _suspend_some(self, n_failed: int | None = None) -> None:
        self._report(self._counts.n_counted.cpu())
        super()._suspend_some(n_failed)

    # Leaving

    def _raised(self) -> Tensor:
        return torch.cat([super()._raised().long(), self._counts.n_counted[None]])

    def _flags(self) -> Tensor:
        flags = super()._flags()
        self._report(flags[2])
        return flags[:2].bool()

    def _report(self, n_counted: Tensor) -> None:
        """Note which passes counted, as far as the host knows."""
        held = self.rows >= 0
        more = (n_counted - self._reported).clamp(min=0)[held]
        self._reported[held] += more
        self.tracks.taken[self.rows[held], self.phases[held], 0] += more
        self.n_padding -= int(more.sum())

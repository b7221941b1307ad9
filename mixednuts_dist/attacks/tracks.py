"""What is known of the images in flight, one row an image: numbers on the host, pixels where they are attacked.

An attempt is one phase of the plan on one image. Its status says how far it is, `taken` what it has cost.

Shapes: N rows, P phases of the plan, T targets an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attack import SlotArrays
from .judge import Verdicts, is_smaller

DONE, PENDING, RUNNING = range(3)  # an attempt's status: over or not wanted; to be begun; begun and not over
NEVER = 1 << 30  # `broken_at` of an image that stands: behind every plan
AS_CLEAN, AS_KNOWN = -2, -1  # `broken_at` of an image that is wrong clean, or at the point that the caller knows


@dataclass
class Tracks(SlotArrays):
    """A table whose rows are given to images as they arrive and are given back; it grows as it must."""

    x: Tensor  # (N, C, H, W) clean images
    best: Tensor  # (N, C, H, W) where the smallest margin was verified
    labels: Tensor  # (N,) where the images are
    host_labels: Tensor  # (N,)
    sample_ids: Tensor  # (N,)
    log_gap: Tensor  # (N,) float64, log(1 - margin) at `best`
    clean_log_gap: Tensor  # (N,) float64
    log_gap_before: Tensor  # (N,) float64, as the image's present block of phases began
    reached: Tensor  # (N, P) float64, the largest log_gap that was verified of each attempt
    best_at: Tensor  # (N,) the phase that found `best`
    broken_at: Tensor  # (N,) the first phase, in the plan's order, that breaks the image
    decided: Tensor  # (N,) bool, the image has left
    block: Tensor  # (N,) where in the plan the image is
    status: Tensor  # (N, P) int8, of each attempt
    taken: Tensor  # (N, P, 2) int32, forward and backward passes of each attempt
    targets: Tensor  # (N, T) classes to be aimed at, the likeliest first
    ranks: Tensor  # (N, T) of these classes on the clean image, 2 = runner-up
    n_judged: Tensor  # (N,) forward passes before any phase
    in_use: Tensor  # (N,) bool, the row is an image's

    @classmethod
    def of(
        cls,
        x: Tensor,
        labels: Tensor,
        sample_ids: Sequence[int],
        clean: Verdicts,
        targets: Tensor,
        ranks: Tensor,
        n_phases: int,
    ) -> "Tracks":
        """Images that arrive, with the judge's verdicts on them as they are."""
        n = len(x)
        return cls(
            x=x, best=x, labels=labels, host_labels=labels.cpu(), sample_ids=torch.tensor(list(sample_ids)),
            log_gap=clean.log_gap, clean_log_gap=clean.log_gap, log_gap_before=clean.log_gap,
            reached=torch.full((n, n_phases), -torch.inf, dtype=torch.float64), best_at=torch.full((n,), AS_CLEAN),
            broken_at=torch.where(clean.wrong, AS_CLEAN, NEVER), decided=torch.zeros(n, dtype=torch.bool),
            block=torch.full((n,), -1), status=torch.full((n, n_phases), DONE, dtype=torch.int8),
            taken=torch.zeros(n, n_phases, 2, dtype=torch.int32), targets=targets, ranks=ranks,
            n_judged=torch.ones(n, dtype=torch.long), in_use=torch.ones(n, dtype=torch.bool),
        )  # fmt: skip

    def admit(self, arrived: "Tracks") -> Tensor:
        """Rows for images that arrive."""
        n, n_rows = len(arrived.in_use), len(self.in_use)
        missing = n - int((~self.in_use).sum())
        if missing > 0:
            self.resize(torch.arange(n_rows), n_rows + max(missing, n_rows // 2))
        rows = (~self.in_use).nonzero().squeeze(1)[:n]
        self.put(rows, vars(arrived))
        return rows

    def release(self, rows: Tensor) -> None:
        """Take rows back for other images."""
        self.in_use[rows] = False

    @property
    def broken(self) -> Tensor:
        """(N,) bool, a point was verified to fool."""
        return self.broken_at < NEVER

    def margin(self, rows: Tensor) -> Tensor:
        """The smallest signed margin verified so far, float64."""
        return -torch.expm1(self.log_gap[rows])

    def n_passes(self, rows: Tensor, stop_when_broken: bool) -> tuple[Tensor, Tensor]:
        """(forward, backward) passes of each image so far.

        An image that leaves as it is broken counts the attempts up to the phase that broke it. Later ones only ran in
        rows that were free; one after the other they would not have been begun.
        """
        taken = self.taken[rows]
        if stop_when_broken:
            taken = taken * (torch.arange(taken.shape[1]) <= self.broken_at[rows, None])[..., None]
        n_forward, n_backward = taken.sum(dim=1).unbind(dim=1)
        return self.n_judged[rows] + n_forward, n_backward

    def offer(self, rows: Tensor, x: Tensor, verdicts: Verdicts, phases: Tensor, stop_when_broken: bool) -> None:
        """Keep those verified points whose margin is smaller than the smallest so far; `phases` found them.

        The outcome does not depend on the order in which an image's attempts end: of equal margins the first phase's
        counts, and with `stop_when_broken` the point of the first phase that breaks the image.
        """
        left = torch.arange(len(rows))
        while len(left):  # a turn for each of an image's points
            is_first = _first_of_each(rows[left])
            turn, left = left[is_first], left[~is_first]
            kept = self._keep(rows[turn], verdicts.log_gap[turn], verdicts.wrong[turn], phases[turn], stop_when_broken)
            if bool(kept.any()):
                to, of = (each[kept].to(x.device, non_blocking=True) for each in (rows[turn], turn))
                self.best[to] = x[of]

    def _keep(self, rows: Tensor, log_gap: Tensor, wrong: Tensor, phases: Tensor, stop_when_broken: bool) -> Tensor:
        """Take in a point of each of these images; (n,) bool, whose point is the best one now."""
        gap_before, broken, broken_at = self.log_gap[rows], self.broken[rows], self.broken_at[rows]
        smaller = is_smaller(log_gap, wrong, gap_before, broken)
        smaller |= (log_gap == gap_before) & (wrong == broken) & (phases < self.best_at[rows])
        breaks = wrong & (phases < broken_at)
        if stop_when_broken:
            smaller = torch.where(wrong, breaks, smaller & ~broken)
        self.broken_at[rows] = torch.where(breaks, phases, broken_at)
        kept = rows[smaller]
        self.log_gap[kept], self.best_at[kept] = log_gap[smaller], phases[smaller]
        return smaller


def _first_of_each(rows: Tensor) -> Tensor:
    """(n,) bool: whether no earlier entry is the same.

    Example:
        >>> _first_of_each(torch.tensor([4, 2, 4])).tolist()
        [True, True, False]
    """
    first: dict[int, int] = {}
    for i, row in enumerate(rows.tolist()):
        first.setdefault(row, i)
    return torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, torch.tensor(list(first.values())), True)

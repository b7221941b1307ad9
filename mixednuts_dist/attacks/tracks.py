"""What is known of the images in flight: one row an image, its numbers on the host, its pixels where they are attacked.

Shapes: N rows, images of C x H x W, T targets.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .judge import Verdicts


class Tracks:
    """A table whose rows are handed out to images and taken back; it grows as it must."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.sample_ids: list[int] = []
        self.broken_by: list[str] = []  # the attack whose point was verified to fool first; "" before
        self.notes: dict[str, Tensor] = {}  # attacks' own numbers, on the host
        self._columns: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def admit(
        self, x: Tensor, labels: Tensor, sample_ids: Sequence[int], clean: Verdicts, targets: Tensor, ranks: Tensor
    ) -> Tensor:
        """Rows (on the host) for new images, with what the judge says of them clean."""
        n = len(x)
        arrived = {
            "x": x,
            "best": x,  # where the smallest margin was verified
            "labels": labels,
            "host_labels": labels.cpu(),
            "log_gap": clean.log_gap,  # log(1 - margin) there, float64
            "clean_log_gap": clean.log_gap,
            "log_gap_before": clean.log_gap,  # as the phase that it is in began
            "broken": clean.wrong,
            "phase": torch.full((n,), -1),  # where in the plan
            "targets": targets,  # classes to be aimed at, the likeliest first
            "ranks": ranks,  # of these classes on the clean image, 2 = runner-up
            "n_forward": torch.zeros(n, dtype=torch.long),
            "n_backward": torch.zeros(n, dtype=torch.long),
        }
        while len(self._free) < n:
            self._grow(arrived, n - len(self._free))
        rows, self._free = torch.tensor(self._free[:n]), self._free[n:]
        for name, values in arrived.items():
            self._columns[name][rows] = values
        for row, sample_id in zip(rows.tolist(), sample_ids, strict=True):
            self.sample_ids[row], self.broken_by[row] = sample_id, ""
        return rows

    def note(self, name: str) -> Tensor:
        """An attack's own numbers, int64, one row an image and 0 at first."""
        return self.notes.setdefault(name, torch.zeros(len(self.sample_ids), dtype=torch.long))

    def release(self, rows: Tensor) -> None:
        """Rows that others may have."""
        self._free = sorted([*self._free, *rows.tolist()])

    def _grow(self, arrived: dict[str, Tensor], missing: int) -> None:
        n_before = len(self.sample_ids)
        more = max(missing, n_before // 2)
        for name, values in arrived.items():
            added = values.new_zeros(more, *values.shape[1:])
            self._columns[name] = torch.cat([self._columns[name], added]) if n_before else added
        for name, values in self.notes.items():
            self.notes[name] = torch.cat([values, values.new_zeros(more, *values.shape[1:])])
        self.sample_ids += [0] * more
        self.broken_by += [""] * more
        self._free += range(n_before, n_before + more)

    def margin(self, rows: Tensor) -> Tensor:
        """The smallest signed margin verified so far, float64."""
        return -torch.expm1(self.log_gap[rows])

    def offer(self, rows: Tensor, x: Tensor, verdicts: Verdicts, attacks: Sequence[str]) -> None:
        """Keep those points whose margin is smaller than the smallest so far; `attacks` names who found each."""
        smaller = is_smaller(verdicts.log_gap, verdicts.wrong, self.log_gap[rows], self.broken[rows])
        better = smaller.nonzero().squeeze(1)
        if not len(better):
            return
        kept = rows[better]
        self.best[kept] = x[better.to(x.device)]
        self.log_gap[kept] = verdicts.log_gap[better]
        for i, row in zip(better.tolist(), kept.tolist(), strict=True):
            if verdicts.wrong[i] and not self.broken[row]:
                self.broken[row], self.broken_by[row] = True, attacks[i]


def is_smaller(log_gap: Tensor, wrong: Tensor, log_gap_before: Tensor, wrong_before: Tensor) -> Tensor:
    """Whether a margin is below the one before; of two ties the one that fools is."""
    return (log_gap > log_gap_before) | ((log_gap == log_gap_before) & wrong & ~wrong_before)

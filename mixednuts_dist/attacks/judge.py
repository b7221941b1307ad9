"""The one judge: everything that is stored or called broken is its verdict.

It asks the classifier itself in float32, with TF32 off, in the run's one batch shape, and goes on with half of the rows
when memory runs out. Margins are computed from its logits in float64, on the host.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes, in_one_shape, proven_before
from ..acceleration.tf32 import tf32_allowed
from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_signed_margin

NEVER = 1 << 30  # a place behind every plan
NONE, AHEAD, DUE, SEATED = range(4)  # stages of a run: not begun or over, may be begun, to be begun next, under way


@dataclass(frozen=True)
class Verdicts:
    """The judge's word on some images, on the host."""

    logits: Tensor  # (B, K) float32
    log_gap: Tensor  # (B,) float64, log(1 - signed margin): the larger, the smaller the margin
    wrong: Tensor  # (B,) bool, the class is not the label

    @property
    def margin(self) -> Tensor:
        """(B,) float64, p_y - max_{j != y} p_j."""
        return -torch.expm1(self.log_gap)


class Judge:
    """Verdicts on images of one classifier.

    Example:
        >>> judge = Judge(lambda x: x.flatten(1)[:, :3], BatchShape(8))
        >>> judge.verdicts(torch.tensor([0.1, 0.9, 0.2]).view(1, 3, 1, 1), torch.tensor([1])).wrong
        tensor([False])
    """

    def __init__(self, model: Callable[[Tensor], Tensor], shape: BatchShape) -> None:
        self.model = model
        self._passes = Passes(shape, lambda x_BCHW: (self._pass(x_BCHW),), proven_before(model, model))

    def logits(self, x_BCHW: Tensor) -> Tensor:
        """The classifier's logits in float32, (B, K), where the images are.

        Raises:
            torch.OutOfMemoryError: where not even one image fits.
        """
        return in_one_shape(self._pass, x_BCHW, self._passes)

    def verdicts(self, x_BCHW: Tensor, labels_B: Tensor) -> Verdicts:
        """Whether each image is classified as its label, and with what margin."""
        logits_BK, labels_B = self.logits(x_BCHW).cpu(), labels_B.cpu()
        log_gap_B = log_one_minus_signed_margin(logits_BK, labels_B)
        return Verdicts(logits_BK, log_gap_B, logits_BK.argmax(dim=1) != labels_B)

    @torch.no_grad()
    def _pass(self, x_BCHW: Tensor) -> Tensor:
        with tf32_allowed(False):
            return self.model(x_BCHW).float()


class Tracks:
    """What is known of the images in flight: one row an image, numbers on the host, pixels where they are attacked.

    A table whose rows are handed out to images and taken back; it grows as it must. A run is one phase of the plan for
    one image; `stage` says how far each is, and `taken` what it has cost.
    """

    def __init__(self, stop_when_broken: bool = True) -> None:
        self.stop_when_broken = stop_when_broken
        self._free: list[int] = []
        self.sample_ids: list[int] = []
        self.broken_by: list[str] = []  # the attack whose point was verified to fool first; "" before
        self._columns: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def admit(
        self,
        x: Tensor,
        labels: Tensor,
        sample_ids: Sequence[int],
        clean: Verdicts,
        targets: Tensor,
        ranks: Tensor,
        n_phases: int,
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
            "log_gap_before": clean.log_gap,  # as the block that it is in began
            "reached": torch.full((n, n_phases), -torch.inf, dtype=torch.float64),  # log_gap that each run has verified
            "best_phase": torch.full((n,), -1),  # which phase has found it
            "broken": clean.wrong,
            "broken_at": torch.where(clean.wrong, -1, NEVER),  # the phase that breaks it
            "block": torch.full((n,), -1),  # where in the plan
            "stage": torch.zeros(n, n_phases, dtype=torch.int8),  # of each run
            "taken": torch.zeros(n, n_phases, 2, dtype=torch.int32),  # passes of each run, forward and backward
            "targets": targets,  # classes to be aimed at, the likeliest first
            "ranks": ranks,  # of these classes on the clean image, 2 = runner-up
            "n_judged": torch.zeros(n, dtype=torch.long),  # forward passes before any phase
        }
        while len(self._free) < n:
            self._grow(arrived, n - len(self._free))
        rows, self._free = torch.tensor(self._free[:n]), self._free[n:]
        for name, values in arrived.items():
            self._columns[name][rows] = values
        for row, sample_id in zip(rows.tolist(), sample_ids, strict=True):
            self.sample_ids[row], self.broken_by[row] = sample_id, ""
        return rows

    def release(self, rows: Tensor) -> None:
        """Rows that others may have."""
        self._free = sorted([*self._free, *rows.tolist()])

    def _grow(self, arrived: dict[str, Tensor], missing: int) -> None:
        n_before = len(self.sample_ids)
        more = max(missing, n_before // 2)
        for name, values in arrived.items():
            added = values.new_zeros(more, *values.shape[1:])
            self._columns[name] = torch.cat([self._columns[name], added]) if n_before else added
        self.sample_ids += [0] * more
        self.broken_by += [""] * more
        self._free += range(n_before, n_before + more)

    def margin(self, rows: Tensor) -> Tensor:
        """The smallest signed margin verified so far, float64."""
        return -torch.expm1(self.log_gap[rows])

    def n_passes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(forward, backward) passes of each image so far.

        Of a broken image they are those that lead to the phase that broke it: runs of later phases, which only filled
        free rows, would not have been begun one after the other.
        """
        last = self.broken_at[rows, None] if self.stop_when_broken else NEVER
        taken = (self.taken[rows] * (torch.arange(self.stage.shape[1]) <= last)[..., None]).sum(dim=1)
        return self.n_judged[rows] + taken[:, 0], taken[:, 1]

    def offer(self, rows: Tensor, x: Tensor, verdicts: Verdicts, attacks: Sequence[str], phases: Tensor) -> None:
        """Keep those points whose margin is smaller than the smallest so far.

        `attacks` and `phases` (the place in the plan) name who found each. In whatever order runs of one image come
        here, the outcome is the same: of equal margins the first phase's counts.
        """
        order = torch.arange(len(rows))
        while len(order):  # a turn for each of an image's points
            first = _first_of_each(rows[order])
            turn, order = order[first], order[~first]
            self._offer(rows[turn], x, verdicts, attacks, phases, turn)

    def _offer(
        self, rows: Tensor, x: Tensor, verdicts: Verdicts, attacks: Sequence[str], phases: Tensor, index: Tensor
    ) -> None:
        log_gap, wrong, phases = verdicts.log_gap[index], verdicts.wrong[index], phases[index]
        before, phase_before = self.log_gap[rows], self.best_phase[rows]
        smaller = is_smaller(log_gap, wrong, before, self.broken[rows])
        smaller |= (log_gap == before) & (wrong == self.broken[rows]) & (phases < phase_before)
        first = wrong & (phases < self.broken_at[rows])
        if self.stop_when_broken:  # the first phase's point, whatever a later one may have found meanwhile
            smaller = torch.where(wrong, first, smaller & ~self.broken[rows])
        for i, row in zip(index[first].tolist(), rows[first].tolist(), strict=True):
            self.broken_by[row] = attacks[i]
        self.broken[rows[first]], self.broken_at[rows[first]] = True, phases[first]
        kept = rows[smaller]
        if len(kept):
            self.best[kept] = x[index[smaller].to(x.device)]
            self.log_gap[kept], self.best_phase[kept] = log_gap[smaller], phases[smaller]


def _first_of_each(rows: Tensor) -> Tensor:
    """(n,) bool: whether no earlier entry is the same."""
    first: dict[int, int] = {}
    for i, row in enumerate(rows.tolist()):
        first.setdefault(row, i)
    return torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, torch.tensor(list(first.values())), True)


def is_smaller(log_gap: Tensor, wrong: Tensor, log_gap_before: Tensor, wrong_before: Tensor) -> Tensor:
    """Whether a margin is below the one before; of two ties the one that fools is."""
    return (log_gap > log_gap_before) | ((log_gap == log_gap_before) & wrong & ~wrong_before)


def check_images(x_BCHW: Tensor, y_B: Tensor) -> None:
    """Refuse what no attack can work on, with the values."""
    if x_BCHW.dim() != 4 or y_B.shape != x_BCHW.shape[:1]:
        raise InvalidInputError(
            f"images of shape {tuple(x_BCHW.shape)} and labels of shape {tuple(y_B.shape)} do not fit: "
            "give images (B, C, H, W) and labels (B,)"
        )
    if not x_BCHW.is_floating_point():
        raise InvalidInputError(f"images are {x_BCHW.dtype}; give float32 in [0, 1] (divide uint8 by 255)")
    if not len(x_BCHW):
        raise InvalidInputError("there is no image to attack: the batch is empty")
    low, high = float(x_BCHW.min()), float(x_BCHW.max())
    if not (low >= 0 and high <= 1):
        raise InvalidInputError(
            f"images range over [{low:g}, {high:g}]; give them in [0, 1], normalisation inside the model"
        )

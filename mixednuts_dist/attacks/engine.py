"""The engine: every attack on every image, each image at its own phase, and every pass full.

An image walks through a plan of phases (APGD-CE, then APGD-T on one target after the other, ...). Images that are in
phases of one kind share a lane, which steps them all in one pass. An image leaves as soon as it is decided, and its
slot is given to the next image, also of the next partition. A result in fast arithmetic counts only after the float32
judge has verified it: when an image seems broken, and as a phase ends.

Slots that no image needs hold further attempts of the images: APGD-CE and the targets of APGD-T or of FAB-T do not need
one another's results, so several of them run on an image at once. The outcome is that of one after the other: the first
attempt, in the plan's order, that breaks the image counts, and the passes of those behind it do not.

Groups (partitions) come from an iterator and are returned as their last image is decided. An image's outcome depends on
the image, its sample id, the seed and the batch shape, not on the groups, their order or the other images.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes
from ..config.threat import ThreatModel
from .attack import Known, Phase, Setting
from .budget import AttackBudget
from .gradient_model import AttackedModel
from .judge import Judge, Verdicts
from .lane import Lane, Leaving
from .progress import Progress
from .tracks import AS_CLEAN, AS_KNOWN, DONE, NEVER, RUNNING, Tracks

CLEAN, CACHED = "clean", "cached"  # what breaks an image beside the attacks
_BESIDE_THE_PLAN = {AS_CLEAN: CLEAN, AS_KNOWN: CACHED, NEVER: ""}
_LONGEST_WAIT = 8  # passes until a point is verified: an attempt that waits falls behind the others

_logger = logging.getLogger(__name__)

Planner = Callable[[Setting], Sequence[Phase]]
LaneKey = tuple[str, bool]  # an attack's lane, in float32


@dataclass(frozen=True)
class Group:
    """Images that come and go together: a partition, or all images of a call."""

    x: Tensor  # (B, C, H, W) clean images
    y: Tensor  # (B,) labels
    sample_ids: Sequence[int]  # key the random numbers
    known: Tensor | None = None  # (B, C, H, W) points of an earlier stage inside the same balls, tried first
    key: Any = None  # the caller's


@dataclass(frozen=True)
class Finished:
    """What is known of a group in the end; (B,) each, on the host but for the images."""

    group: Group
    best: Tensor  # where the smallest margin was verified; for a broken image it fools
    log_gap: Tensor  # float64, log(1 - margin) there
    broken: Tensor  # bool
    broken_by: list[str]  # the attack that broke it, "clean", "cached", or "" for what stands
    n_forward: int  # passes of real images; padding is not counted
    n_backward: int
    decided: Tensor  # bool: False for images whose attack was interrupted


@dataclass
class Engine:
    """Runs a plan on groups of images.

    Args:
        attacked: what is attacked and judged.
        planner: makes the plan, once the number of classes is known.
        stop_when_broken: an image leaves as soon as it is verified to be fooled; otherwise it ends its plan.
        progress: called with a `Progress` whenever images were judged.
    """

    attacked: AttackedModel
    planner: Planner
    threat: ThreatModel
    budget: AttackBudget
    seed: int
    shape: BatchShape
    stop_when_broken: bool = True
    progress: Callable[[Progress], None] | None = None
    # Made with the first group, from which the plan's setting is known.
    tracks: Tracks = field(init=False)
    plan: Sequence[Phase] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.judge = Judge(self.attacked.model, self.shape)
        fast, finer = self.attacked.fast, self.attacked.float32
        self._passes = {False: Passes(self.shape, fast.probe, fixed=fast.compiled)}
        self._passes[True] = self._passes[False] if finer is None else Passes(self.shape.float32, finer.probe)
        self._lanes: dict[LaneKey, Lane] = {}
        self._lane_order: list[LaneKey] = []  # as the plan comes to them
        self._blocks: list[tuple[int, int]] = []  # (first, stop) phases that may run side by side on an image
        self._to_verify: list[Leaving] = []
        self._waited = 0  # passes since the first of them left its slot
        self._present: list[tuple[Group, Tensor]] = []  # groups in flight and their rows
        self.n_decided = 0  # images of all groups so far
        self._n_images = self._n_broken = self._n_forward = self._n_backward = 0
        self._n_in_vain = 0  # passes of attempts behind the one that broke the image

    @property
    def _is_dear(self) -> bool:
        """Whether a float32 row costs much more than others: it has a batch shape of its own there."""
        return self.shape.float32 is not self.shape

    def run(self, source: Iterable[Group | None]) -> Iterator[Finished]:
        """Each group as its last image is decided.

        The next group is taken from the source whenever slots are free. It may give None, "nothing yet": the engine
        goes on with what it has, and takes again after the next pass; a source that will have nothing for a while waits
        a little before it says so. After its end the engine finishes what it has.

        Raises:
            torch.OutOfMemoryError: where not even one image fits.
        """
        groups, is_open = iter(source), True
        while is_open or self._present:
            while is_open and not any(lane.is_full for lane in self._lanes.values()):
                group = next(groups, _END)
                if isinstance(group, _End):
                    is_open = False
                elif group is None:
                    break
                else:
                    self._admit(group)
                    yield from self._finished()
            self._work()
            yield from self._finished()

    def run_one(self, group: Group) -> Finished:
        """One group; a keyboard interrupt returns what is verified of it by then."""
        try:
            return next(self.run([group]))
        except KeyboardInterrupt:
            if not self._present:  # not even the clean images were judged
                raise
            _logger.warning(
                "interrupted: what is verified so far is returned, and `decided` says which images are done"
            )
            return self._outcome(*self._present[0])

    def _work(self) -> None:
        """One pass: of the judge where many points are to be verified, else of a lane."""
        n_to_verify = sum(len(leaving.rows) for leaving in self._to_verify)
        # A full lane is emptied before the one that feeds it. Where none is full, the first of the plan is stepped: its
        # images then join those further on, so that images that came apart go through a long search together.
        busy = [self._lanes[key] for key in self._lane_order if key in self._lanes and self._lanes[key].n_ready]
        full = [lane for lane in busy if lane.is_full]
        lane = full[-1] if full else busy[0] if busy else None
        if n_to_verify and (lane is None or self._is_due(n_to_verify, lane, bool(full))):
            self._verify()
        elif lane is not None:
            lane.step()
            self._waited += bool(self._to_verify)
            if (leaving := lane.leaving()) is not None:
                self._to_verify.append(leaving)

    def _is_due(self, n_to_verify: int, lane: Lane, is_full: bool) -> bool:
        """Whether the points that wait for the judge go before the lane's next pass.

        A verification is a forward pass alone, and gives images back to their lanes: it need not be full. Images of
        another lane are verified before a pass that has room for them. Where float32 rows are dear, points wait for one
        another while coarse passes go on.
        """
        if n_to_verify >= self.judge.passes.shape.rows or self._waited >= _LONGEST_WAIT:
            return True
        if self._is_dear:
            return not is_full and lane.passes is not self._passes[False]
        return not is_full and (4 * n_to_verify >= lane.n_ready or any(of.lane is not lane for of in self._to_verify))

    # Images come, go from block to block, and leave

    def _admit(self, group: Group) -> None:
        clean = self.judge.verdicts(group.x, group.y)
        known = None if group.known is None else self.judge.verdicts(group.known, group.y)
        n_classes = clean.logits.shape[1]
        if not self._n_images:
            self._plan(n_classes)
        targets, ranks = ordered_targets(clean.logits, self.budget.n_targets(n_classes), known)
        arrived = Tracks.of(group.x, group.y, group.sample_ids, clean, targets, ranks, len(self.plan))
        if not self._n_images:
            self.tracks = Tracks(**arrived.take(torch.arange(0)))
        rows = self.tracks.admit(arrived)
        if known is not None and group.known is not None:
            self.tracks.n_judged[rows] += 1
            self.tracks.offer(rows, group.known, known, torch.full_like(rows, AS_KNOWN), self.stop_when_broken)
        self._present.append((group, rows))
        self._n_images += len(rows)
        leaves = self.tracks.broken[rows] & self.stop_when_broken
        self._decide(rows[leaves])
        self._advance(rows[~leaves])

    def _plan(self, n_classes: int) -> None:
        coarse, subject = self.attacked.float32 is not None, self.attacked.subject or self.attacked.model
        self.plan = self.planner(Setting(self.threat, self.budget, n_classes, self.seed, subject, coarse))
        lanes = [_lane_key(phase) for phase in self.plan]
        # Dear passes come last: they wait until they are full, or until no other attempt can go on.
        self._lane_order = sorted(dict.fromkeys(lanes), key=lambda key: self._is_dear and key[1])
        starts = [i for i, phase in enumerate(self.plan) if not (i and phase.beside and lanes[i] == lanes[i - 1])]
        self._blocks = list(pairwise([*starts, len(self.plan)]))

    def _advance(self, rows: Tensor) -> None:
        """Send images to the next block of the plan with a phase that wants them; without one they are decided."""
        tracks = self.tracks
        tracks.block[rows] += 1
        while len(rows):
            position = int(tracks.block[rows].min())
            is_here = tracks.block[rows] == position
            here, rows = rows[is_here], rows[~is_here]
            if position >= len(self._blocks):
                self._decide(here)
                continue
            first, stop = self._blocks[position]
            wanted = torch.stack([self._wanted(here, place) for place in range(first, stop)], dim=1)
            enters = wanted.any(dim=1)
            tracks.block[here[~enters]] += 1
            rows, here = torch.cat([rows, here[~enters]]), here[enters]
            if len(here):
                tracks.log_gap_before[here] = tracks.log_gap[here]
                self._lane(self.plan[first]).enter(here, first, wanted[enters])

    def _wanted(self, rows: Tensor, place: int) -> Tensor:
        """(n,) bool: which images take the phase."""
        wanted = self.plan[place].wanted
        return torch.ones(len(rows), dtype=torch.bool) if wanted is None else wanted(self._known(rows, place))

    def _known(self, rows: Tensor, place: int) -> Known:
        tracks = self.tracks
        return Known(
            margin=tracks.margin(rows),
            clean_margin=-torch.expm1(tracks.clean_log_gap[rows]),
            gained=tracks.log_gap[rows].expm1() - tracks.log_gap_before[rows].expm1(),
            behind=self._behind(rows, place),
        )

    def _behind(self, rows: Tensor, place: int) -> Tensor:
        """`Known.behind`."""
        repeated = _in_coarse_arithmetic(self.plan, place)
        if repeated is None:
            return torch.zeros(len(rows), dtype=torch.float64)
        coarse = torch.tensor([not phase.in_float32 for phase in self.plan[:place]])
        reached = self.tracks.reached[rows, :place].expm1()
        behind: Tensor = reached[:, coarse].amax(dim=1) - reached[:, repeated]
        return behind

    def _decide(self, rows: Tensor) -> None:
        self.tracks.decided[rows] = True
        self.n_decided += len(rows)
        self._n_broken += int(self.tracks.broken[rows].sum())

    def _finished(self) -> Iterator[Finished]:
        for group, rows in list(self._present):
            if bool(self.tracks.decided[rows].all()):
                self._present = [each for each in self._present if each[1] is not rows]
                outcome = self._outcome(group, rows)
                self._n_forward += outcome.n_forward
                self._n_backward += outcome.n_backward
                taken = self.tracks.taken[rows, :, 0].sum() + self.tracks.n_judged[rows].sum()
                self._n_in_vain += int(taken) - outcome.n_forward
                self.tracks.release(rows)
                yield outcome

    def _outcome(self, group: Group, rows: Tensor) -> Finished:
        tracks = self.tracks
        n_forward, n_backward = self._n_passes(rows)
        broken_by = [
            _BESIDE_THE_PLAN[at] if at in _BESIDE_THE_PLAN else self.plan[at].attack
            for at in tracks.broken_at[rows].tolist()
        ]
        return Finished(
            group, tracks.best[rows], tracks.log_gap[rows], tracks.broken[rows], broken_by, n_forward, n_backward,
            tracks.decided[rows],
        )  # fmt: skip

    # Lanes and verdicts

    def _lane(self, phase: Phase) -> Lane:
        key = _lane_key(phase)
        if key not in self._lanes:
            model = self.attacked.in_float32 if phase.in_float32 else self.attacked.fast
            passes = self._passes[phase.in_float32]
            self._lanes[key] = Lane(phase.stepper, model, passes, self.tracks, self.plan, self.stop_when_broken)
        return self._lanes[key]

    def _verify(self) -> None:
        """The judge on all points that have left the lanes, and where each image goes from there."""
        tracks = self.tracks
        left, self._to_verify, self._waited = self._to_verify, [], 0
        rows, phases, x, ended = (
            torch.cat(each) for each in zip(*((of.rows, of.phases, of.x, of.ended) for of in left), strict=True)
        )
        verdicts = self.judge.verdicts(x, tracks.host_labels[rows])
        tracks.taken[rows, phases, 0] += 1
        tracks.reached[rows, phases] = torch.maximum(tracks.reached[rows, phases], verdicts.log_gap)
        tracks.offer(rows, x, verdicts, phases, self.stop_when_broken)
        tracks.status[rows[ended], phases[ended]] = DONE
        for lane in dict.fromkeys(each.lane for each in left):
            self._go_on(lane, [each for each in left if each.lane is lane])
        if self.progress is not None:
            self.progress(self._progress())

    def _go_on(self, lane: Lane, verified: list[Leaving]) -> None:
        """Images of a lane that were judged: their attempts go on, they go to the next block, or they leave."""
        tracks, status = self.tracks, self.tracks.status
        images = torch.unique(torch.cat([each.rows for each in verified]))
        broken = images[tracks.broken[images] & self.stop_when_broken]
        if len(broken):
            # Attempts behind the phase that breaks an image count no more; those before it may still break it earlier.
            is_behind = torch.arange(status.shape[1]) >= tracks.broken_at[broken, None]
            status[broken] = status[broken].masked_fill(is_behind, DONE)
            lane.drop()
        for each in verified:  # where the point was refuted, the passes since lie on the attempt's way
            lane.resume(each.unended)
            rows, phases = each.unended.rows, each.unended.phases
            goes_on = (status[rows, phases] == RUNNING)[:, None]
            tracks.taken[rows, phases] += torch.tensor(each.late, dtype=torch.int32) * goes_on
        leaving = images[(status[images] == DONE).all(dim=1)]
        lane.n_images -= len(leaving)
        decided = tracks.broken[leaving] & self.stop_when_broken
        self._decide(leaving[decided])
        self._advance(leaving[~decided])

    # Counts

    def _n_passes(self, rows: Tensor) -> tuple[int, int]:
        n_forward, n_backward = self.tracks.n_passes(rows, self.stop_when_broken)
        return int(n_forward.sum()), int(n_backward.sum())

    @property
    def n_forward_in_flight(self) -> int:
        """Passes so far of images whose groups are not finished."""
        return sum(self._n_passes(rows)[0] for _, rows in self._present)

    @property
    def n_padding(self) -> int:
        """Rows of passes so far that held no attempt, or one that counted for no image in the end."""
        return self._n_in_vain + sum(lane.n_padding for lane in self._lanes.values())

    def _progress(self) -> Progress:
        n_backward = self._n_backward + sum(self._n_passes(rows)[1] for _, rows in self._present)
        n_forward = self._n_forward + self.n_forward_in_flight
        return Progress(self._n_images, self.n_decided, self._n_broken, n_forward, n_backward)


class _End:
    """After the last group."""


_END = _End()


def _lane_key(phase: Phase) -> tuple[str, bool]:
    return phase.stepper.lane, phase.in_float32


def _in_coarse_arithmetic(plan: Sequence[Phase], place: int) -> int | None:
    """Where the phase is that the one at `place` repeats in float32; None where it repeats none."""

    def run(phase: Phase) -> tuple[str, int, int]:
        return phase.name, phase.target, phase.restart

    again = plan[place]
    coarse = (i for i, phase in enumerate(plan[:place]) if not phase.in_float32 and run(phase) == run(again))
    return next(coarse, None) if again.in_float32 else None


def ordered_targets(clean_BK: Tensor, n_targets: int, known: Verdicts | None) -> tuple[Tensor, Tensor]:
    """Each image's targets, (B, T), and their ranks on the clean image (2 = runner-up).

    The targets are the classes of the clean logits' ranks 2 .. T + 1, as published. They are taken in that order or,
    where a point of an earlier stage is known, by its logits: the nearest class there is the likeliest to succeed.
    """
    by_rank = clean_BK.sort(dim=1, descending=False).indices.flip(1)[:, 1 : n_targets + 1]
    ranks = torch.arange(2, n_targets + 2).expand_as(by_rank)
    if known is None:
        return by_rank, ranks
    order = known.logits.gather(1, by_rank).sort(dim=1, descending=True, stable=True).indices
    return by_rank.gather(1, order), ranks.gather(1, order)

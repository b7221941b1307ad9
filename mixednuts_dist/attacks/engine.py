"""The engine: every attack on every image, each image at its own phase, and every pass full.

An image walks through a plan of phases (APGD-CE, then APGD-T on one target after the other, ...). Images that are in
phases of one kind share a lane, which steps them all in one pass of the run's batch shape. As soon as an image's fate
is decided it leaves, and the next one takes its seat, from the next partition too. Whatever a lane's arithmetic makes
believe counts once the float32 judge has verified it: when an image seems broken, and as a phase ends.

Seats that no image needs go to images' further phases: APGD-CE and the targets of APGD-T or of FAB-T are independent of
one another, so an image may take several of them at once. Its outcome stays that of one after the other: the first, in
the plan's order, that breaks it counts, and the passes of those behind it do not.

Groups (partitions) come from an iterator and go out as their last image is decided. An image's outcome depends on the
image, its sample id, the seed and the batch shape, not on the groups, their order or its company.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, Passes, keep_freed_memory
from ..threat import ThreatModel
from .attack import Known, Phase, Setting, SpeculativeSearch
from .budget import AttackBudget
from .gradient_model import AttackedModel, GradientModel
from .judge import AHEAD, NONE, SEATED, Judge, Tracks, Verdicts
from .lane import Lane, Leaving, rows_of
from .speculative import SpeculativeLane

CLEAN, CACHED = "clean", "cached"  # what breaks an image beside the attacks
_LONGEST_WAIT = 8  # passes until an estimate is verified: an image that waits falls behind the others

_logger = logging.getLogger(__name__)

Planner = Callable[[Setting], Sequence[Phase]]


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
    n_forward: int  # passes of real images; rows that fill a batch up are not counted
    n_backward: int
    decided: Tensor  # bool: False for images whose attack was interrupted


@dataclass(frozen=True)
class Progress:
    """How far a call has come."""

    n_images: int
    n_decided: int
    n_broken: int  # of the decided
    n_forward: int  # passes of real images so far
    n_backward: int


@dataclass
class _Present:
    """A group in flight."""

    group: Group
    rows: Tensor
    n_open: int


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
    tracks: Tracks = field(init=False)
    plan: Sequence[Phase] = field(init=False, default=())

    def __post_init__(self) -> None:
        keep_freed_memory()
        self.judge = Judge(self.attacked.model, self.shape)
        self.tracks = Tracks(self.stop_when_broken)
        self._lanes: dict[tuple[str, bool], Lane] = {}
        self._passes: dict[bool, Passes] = {}
        self.setting: Setting | None = None
        self._lane_order: list[tuple[str, bool]] = []  # as the plan comes to them
        self._blocks: list[tuple[int, int]] = []  # (first, stop) phases that an image may take side by side
        self._to_judge: list[Leaving] = []
        self._waited = 0  # passes since the first of them left its seat
        self._present: list[_Present] = []
        self._group_of: dict[int, _Present] = {}
        self.n_decided = 0  # images of all groups so far
        self._n_images = self._n_broken = self._n_forward = self._n_backward = 0
        self._n_ahead_in_vain = 0  # passes of runs behind the one that broke the image

    def run(self, source: Iterable[Group | None]) -> Iterator[Finished]:
        """Each group as its last image is decided.

        The source is asked for the next group whenever seats are empty. It may give None, "nothing yet": the engine
        goes on with what it has, and asks again after the next pass; a source that will have nothing for a while waits
        a little before it says so. After its end the engine finishes what it has.

        Raises:
            torch.OutOfMemoryError: where not even one image fits.
        """
        groups, open_source = iter(source), True
        while open_source or self._present:
            while open_source and not self._some_lane_is_full():
                group = next(groups, _END)
                if isinstance(group, _End):
                    open_source = False
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
            return self._outcome(self._present[0])

    def _some_lane_is_full(self) -> bool:
        return any(lane.n_images >= self.shape.rows for lane in self._lanes.values())

    def _work(self) -> None:
        """One pass: of the judge where many wait for it, else of a lane."""
        n_claims = sum(len(leaving.rows) for leaving in self._to_judge)
        # A full lane is emptied before the one that feeds it. Where none is full, the first of the plan is stepped: who
        # leaves it joins those who wait further on, so that images that came apart go through a long search together.
        busy = [self._lanes[key] for key in self._lane_order if key in self._lanes and self._lanes[key].n_ready]
        full = [lane for lane in busy if lane.n_images >= self.shape.rows]
        lane = full[-1] if full else busy[0] if busy else None
        # A verification is a forward pass alone, and gives images back to their lanes: it need not be full. Images of
        # another lane are verified before a pass that has room for them.
        if n_claims and (
            lane is None
            or n_claims >= self.shape.rows
            or self._waited >= _LONGEST_WAIT
            or (not full and (4 * n_claims >= lane.n_ready or any(claim.lane is not lane for claim in self._to_judge)))
        ):
            self._verify()
        elif lane is not None:
            lane.step()
            self._waited += bool(self._to_judge)
            if (leaving := lane.leaving()) is not None:
                self._to_judge.append(leaving)

    # Coming and going

    def _admit(self, group: Group) -> None:
        clean = self.judge.verdicts(group.x, group.y)
        n_classes = clean.logits.shape[1]
        if self.setting is None:
            coarse = self.attacked.float32 is not None
            self.setting = Setting(self.threat, self.budget, n_classes, self.seed, self.attacked.model, coarse)
            self.plan = self.planner(self.setting)
            lanes = [_lane_key(phase) for phase in self.plan]
            self._lane_order = list(dict.fromkeys(lanes))
            starts = [i for i, phase in enumerate(self.plan) if not (i and phase.beside and lanes[i] == lanes[i - 1])]
            self._blocks = list(pairwise([*starts, len(self.plan)]))
        known = None if group.known is None else self.judge.verdicts(group.known, group.y)
        targets, ranks = ordered_targets(clean.logits, self.budget.n_targets(n_classes), known)
        rows = self.tracks.admit(group.x, group.y, group.sample_ids, clean, targets, ranks, len(self.plan))
        self.tracks.n_judged[rows] = 1 + (known is not None)
        for row in rows[clean.wrong].tolist():
            self.tracks.broken_by[row] = CLEAN
        if known is not None and group.known is not None:
            self.tracks.offer(rows, group.known, known, [CACHED] * len(rows), torch.full_like(rows, -1))
        present = _Present(group, rows, len(rows))
        self._present.append(present)
        self._group_of.update(dict.fromkeys(rows.tolist(), present))
        self._n_images += len(rows)
        stays = ~self.tracks.broken[rows] if self.stop_when_broken else torch.ones(len(rows), dtype=torch.bool)
        self._decide(rows[~stays])
        self._advance(rows[stays])

    def _advance(self, rows: Tensor) -> None:
        """Send images to the next block of the plan that they want; who has none left is decided."""
        tracks = self.tracks
        tracks.block[rows] += 1
        while len(rows):
            position = int(tracks.block[rows].min())
            here = rows[tracks.block[rows] == position]
            rows = rows[tracks.block[rows] != position]
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
        phase = self.plan[place]
        tracks = self.tracks
        targets = tracks.targets[rows, phase.target - 1] if phase.target else tracks.host_labels[rows]
        clean_margin = -torch.expm1(tracks.clean_log_gap[rows])
        gained = tracks.log_gap[rows].expm1() - tracks.log_gap_before[rows].expm1()
        own = torch.tensor([each.stepper is phase.stepper for each in self.plan])
        n_own = tracks.taken[rows][:, own, 1].sum(dim=1)
        return Known(tracks.margin(rows), clean_margin, gained, self._behind(rows, place), targets, n_own)

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
        self.n_decided += len(rows)
        self._n_broken += int(self.tracks.broken[rows].sum())
        for row in rows.tolist():
            self._group_of.pop(row).n_open -= 1

    def _finished(self) -> Iterator[Finished]:
        done = [present for present in self._present if present.n_open == 0]
        self._present = [present for present in self._present if present.n_open]
        for present in done:
            outcome = self._outcome(present)
            self._n_forward += outcome.n_forward
            self._n_backward += outcome.n_backward
            taken = self.tracks.taken[present.rows, :, 0].sum() + self.tracks.n_judged[present.rows].sum()
            self._n_ahead_in_vain += int(taken) - outcome.n_forward
            self.tracks.release(present.rows)
            yield outcome

    def _outcome(self, present: _Present) -> Finished:
        rows, tracks = present.rows, self.tracks
        n_forward, n_backward = tracks.n_passes(rows)
        return Finished(
            present.group, tracks.best[rows], tracks.log_gap[rows], tracks.broken[rows],
            [tracks.broken_by[row] for row in rows.tolist()],
            int(n_forward.sum()), int(n_backward.sum()),
            torch.tensor([row not in self._group_of for row in rows.tolist()]),
        )  # fmt: skip

    # Lanes and verdicts

    def _lane(self, phase: Phase) -> Lane:
        key = _lane_key(phase)
        if key not in self._lanes:
            model = self._gradient_model(phase.in_float32)
            kind = SpeculativeLane if isinstance(phase.stepper, SpeculativeSearch) else Lane
            self._lanes[key] = kind(
                phase.stepper, model, self.shape, self._shapes(model, phase), self.tracks, self.plan,
                self.stop_when_broken,
            )  # fmt: skip
        return self._lanes[key]

    def _gradient_model(self, in_float32: bool) -> GradientModel:
        finer = self.attacked.float32
        return finer if in_float32 and finer is not None else self.attacked.fast

    def _shapes(self, model: GradientModel, phase: Phase) -> Passes:
        """The smaller shapes of a gradient model, tried once for all lanes on it."""
        if phase.in_float32 not in self._passes:
            shape = self.shape
            if model.compiled and not shape.fixed:
                shape.fixed = True  # each shape would be compiled
            self._passes[phase.in_float32] = Passes(shape, model.probe, model.proven)
        return self._passes[phase.in_float32]

    def _verify(self) -> None:
        """The judge on all that has left the lanes, and where each image goes from there."""
        tracks = self.tracks
        claims, self._to_judge, self._waited = self._to_judge, [], 0
        rows, phases = torch.cat([claim.rows for claim in claims]), torch.cat([claim.phases for claim in claims])
        x, ended = torch.cat([claim.x for claim in claims]), torch.cat([claim.ended for claim in claims])
        verdicts = self.judge.verdicts(x, tracks.host_labels[rows])
        tracks.taken[rows, phases, 0] += 1
        tracks.reached[rows, phases] = torch.maximum(tracks.reached[rows, phases], verdicts.log_gap)
        tracks.offer(rows, x, verdicts, [self.plan[phase].attack for phase in phases.tolist()], phases)
        tracks.stage[rows[ended], phases[ended]] = NONE
        for lane in dict.fromkeys(claim.lane for claim in claims):
            self._go_on(lane, [claim for claim in claims if claim.lane is lane])
        if self.progress is not None:
            self.progress(self._progress())

    def _go_on(self, lane: Lane, claims: list[Leaving]) -> None:
        """Images of a lane of whom the judge has heard: to their next runs, to the next block, or out."""
        tracks, stage = self.tracks, self.tracks.stage
        images = torch.unique(torch.cat([claim.rows for claim in claims]))
        broken = images[tracks.broken[images] & self.stop_when_broken]
        if len(broken):
            # Runs behind the phase that breaks an image count no more; those before it may still break it earlier.
            behind = torch.arange(stage.shape[1]) >= tracks.broken_at[broken, None]
            stage[broken] = stage[broken].masked_fill(behind, NONE)
            lane.drop()
        for claim in claims:
            rows, phases = claim.rows[~claim.ended], claim.phases[~claim.ended]
            kept = (stage[rows, phases] == SEATED).nonzero().squeeze(1)
            if len(kept):
                index = kept.to(claim.x.device)
                state, found = claim.saved
                lane.resume(rows[kept], phases[kept], (rows_of(state, index), rows_of(found, index)))
        under_way = stage[images] != NONE
        stays = under_way.any(dim=1)
        first = under_way.int().argmax(dim=1)
        due = stays & (stage[images, first] == AHEAD)
        if bool(due.any()):
            lane.due(images[due], first[due])
        leaving = images[~stays]
        lane.n_images -= len(leaving)
        decided = tracks.broken[leaving] & self.stop_when_broken
        self._decide(leaving[decided])
        self._advance(leaving[~decided])

    @property
    def n_forward_in_flight(self) -> int:
        """Passes so far of images whose groups are not finished."""
        return sum(int(self.tracks.n_passes(present.rows)[0].sum()) for present in self._present)

    @property
    def n_filling(self) -> int:
        """Rows of passes so far that nobody sat in, or that counted for no image in the end."""
        return self._n_ahead_in_vain + sum(lane.n_filling for lane in self._lanes.values())

    def _progress(self) -> Progress:
        n_backward = self._n_backward + sum(int(self.tracks.n_passes(each.rows)[1].sum()) for each in self._present)
        n_forward = self._n_forward + self.n_forward_in_flight
        return Progress(self._n_images, self.n_decided, self._n_broken, n_forward, n_backward)


class Stream:
    """One engine for many calls, each of which ends one group: its free seats go to the groups of later calls.

    Args:
        engine: that nothing else uses.
        group: makes the group of a key; called once for each that is asked for.
    """

    def __init__(self, engine: Engine, group: Callable[[Any], Group]) -> None:
        self.engine, self._group = engine, group
        self._outcomes = engine.run(self._groups())
        self._asked: deque[Any] = deque()  # keys whose groups the engine has not taken yet
        self._inside: set[Any] = set()  # keys whose groups it has taken and not given back
        self._done: dict[Any, Finished] = {}
        self._wanted: Any = None
        self._n_returned = 0  # images of the groups that it has given back

    @property
    def n_decided(self) -> int:
        """Images of groups that are not returned yet whose fate is decided."""
        return self.engine.n_decided - self._n_returned

    @property
    def n_forward_begun(self) -> int:
        """Passes so far of images of groups that are not returned yet."""
        return self.engine.n_forward_in_flight + sum(finished.n_forward for finished in self._done.values())

    def finish(self, key: Any, ahead: Sequence[Any] = ()) -> Finished:
        """The outcome of a key's group; meanwhile the groups of `ahead` come in, one after the other, as seats empty.

        A group that cannot be made ahead of its turn is left until then. After an error the stream is of no more use.
        """
        self._wanted = key
        self._asked = deque(each for each in (key, *ahead) if each not in self._inside and each not in self._done)
        while key not in self._done:
            finished = next(self._outcomes)
            self._inside.discard(finished.group.key)
            self._done[finished.group.key] = finished
        outcome = self._done.pop(key)
        self._n_returned += len(outcome.group.y)
        for each in set(self._done) - set(ahead):  # somebody else has them now
            self._n_returned += len(self._done.pop(each).group.y)
        return outcome

    def _groups(self) -> Iterator[Group | None]:
        while True:
            if not self._asked:
                yield None
                continue
            key = self._asked.popleft()
            try:
                group = replace(self._group(key), key=key)
            except Exception as error:
                if key == self._wanted:
                    raise
                _logger.info("%s is not begun ahead of its turn: %s", key, error)
                continue
            self._inside.add(key)
            yield group


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


def shown_or(progress: Callable[[Progress], None] | None, verbose: bool) -> Callable[[Progress], None] | None:
    """The caller's callback; with `verbose` and none, a line on stderr that is written over."""
    return show if verbose and progress is None else progress


def show(progress: Progress) -> None:
    """A bar, the counts and the passes on one line of stderr."""
    width = 20 * progress.n_decided // max(progress.n_images, 1)
    print(
        f"\r[{'#' * width:<20}] {progress.n_decided} of {progress.n_images} images decided, {progress.n_broken} "
        f"broken; {progress.n_forward:,} forward and {progress.n_backward:,} backward passes",
        end="\n" if progress.n_decided == progress.n_images else "", file=sys.stderr, flush=True,
    )  # fmt: skip

"""The grid search in rounds: the whole grid, then finer ones around the best candidate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .candidates import CandidateGrid
from .exploration import Axes, Exploration, Subgrid
from .selection_result import SelectedCandidate


@dataclass(frozen=True)
class GridRounds:
    """Round 0 is the grid for every clamp and width; up to `n_refine` more zoom in on the best candidate at `beta`.

    A round that does not improve the objective is the last one.
    """

    grid: CandidateGrid
    beta: float
    n_refine: int

    def propose(self, exploration: Exploration) -> list[Subgrid]:
        """See `Proposer.propose`."""
        if not exploration.parts:
            return [Subgrid(clamp, ln_k, 0, self.grid) for clamp, ln_k in exploration.pairs]
        last = exploration.parts[-1].subgrid.round
        best = exploration.choice(self.beta)
        if best is None or last >= self.n_refine:
            return []
        before = exploration.before(last).choice(self.beta) if last else None
        if before is not None and before.candidate.objective_count == best.candidate.objective_count:
            return []
        found = best.part.subgrid
        zoomed = zoomed_grid(self.grid, exploration.axes(found.pair), best.candidate)
        return [Subgrid(found.clamp, found.ln_k, last + 1, zoomed)]


def zoomed_grid(grid: CandidateGrid, axes: Axes, best: SelectedCandidate) -> CandidateGrid:
    """A grid of the size of `grid` between the tried values beside `best`; beyond the edge where it lies on one."""
    return CandidateGrid(
        _between(_neighbours(best.scale, axes.scales, ratio=True), len(grid.scales), ratio=True),
        _between(_neighbours(best.power, axes.powers, positive=True), len(grid.powers)),
        _between(_neighbours(best.bias, axes.biases), len(grid.biases)),
        grid.betas,
    )


def _neighbours(
    value: float, tried: Sequence[float], *, ratio: bool = False, positive: bool = False
) -> tuple[float, float]:
    """The tried values below and above; where there is none, as far away as the other one."""
    below = max((other for other in tried if other < value), default=None)
    above = min((other for other in tried if other > value), default=None)
    if below is None and above is None:
        return value, value
    if above is None:
        assert below is not None
        above = value * value / below if ratio else 2 * value - below
    if below is None:
        below = value * value / above if ratio else 2 * value - above
    return (max(below, value / 2) if positive else below), above


def _between(ends: tuple[float, float], count: int, *, ratio: bool = False) -> tuple[float, ...]:
    """`count` values evenly spaced inside the interval, without its ends; its one value where it has no inside."""
    low, high = ends
    if low == high:
        return (low,)
    if ratio:
        return tuple(math.exp(value) for value in _between((math.log(low), math.log(high)), count))
    return tuple(low + (high - low) * i / (count + 1) for i in range(1, count + 1))

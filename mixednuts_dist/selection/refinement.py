"""The grid search in refinements: the whole grid, then finer ones around the best candidate."""

from dataclasses import dataclass, replace
from typing import Protocol

from .choice import Exploration
from .grid import Grid


class Proposer(Protocol):
    """Decides what a search tries next."""

    def propose(self, exploration: Exploration) -> list[Grid]:
        """The grids to try next, given all earlier ones; none where the search is over."""
        ...


@dataclass(frozen=True)
class GridRefinements:
    """First the grid for every clamp and width; then up to `n_refine` finer ones around the best candidate at `beta`.

    A refinement that does not improve the objective is the last one.
    """

    grid: Grid
    beta: float
    n_refine: int

    def propose(self, exploration: Exploration) -> list[Grid]:
        """See `Proposer.propose`."""
        if not exploration.parts:
            return [replace(self.grid, clamp=clamp, ln_k=ln_k) for clamp, ln_k in exploration.pairs]
        last = exploration.parts[-1].grid.refinement
        best = exploration.choice(self.beta)
        if best is None or last >= self.n_refine:
            return []
        before = exploration.before(last).choice(self.beta) if last else None
        if before is not None and before.objective_count == best.objective_count:
            return []
        tried = exploration.tried((best.clamp, best.ln_k))
        zoomed = self.grid.zoomed(tried, best.at)
        return [replace(zoomed, clamp=best.clamp, ln_k=best.ln_k, refinement=last + 1)]

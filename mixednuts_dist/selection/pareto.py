"""The exact front of (clean, kept) over all candidates and cutoffs, and the choices that a target asks for.

A choice is on the front where no candidate with any cutoff has more clean images right and keeps as many, or keeps more
and has as many right. Nothing is sampled: the best count is found for every number of images that can be kept.

Shapes: n images of the constraint, G candidates.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from ..errors import InvalidInputError
from .choice import Choice, choice_of, undeployable_candidates
from .criteria import Criterion
from .grid import Grid
from .selection import score_candidates

_Best = tuple[tuple[float, ...], tuple[float, float, float]]  # what ranks it, and (scale, power, bias)


def pareto_front(searched: Iterable[tuple[Criterion, Grid]]) -> tuple[Choice, ...]:
    """The front over all of these grids, most images kept first; `beta` of each is the share that it keeps.

    The criterion must be one that looks for the best cutoff, as `exact` does.
    """
    best: dict[int, tuple[_Best, Criterion, Grid]] = {}
    for criterion, grid in searched:
        if not criterion.inequality:
            raise InvalidInputError(
                f"criterion {criterion.name!r} fixes the cutoff by beta: it has no front of cutoffs"
            )
        for slab in grid.slabs():
            for n_kept, found in _best_of_slab(criterion, slab).items():
                if n_kept not in best or found < best[n_kept][0]:
                    best[n_kept] = found, criterion, grid
    front: list[Choice] = []
    for n_kept in sorted(best, reverse=True):
        ((count, kept, log_cutoff, *_), at), criterion, grid = best[n_kept]
        if not front or -count > front[-1].objective_count:
            share = -kept / criterion.n_attacked
            front.append(
                choice_of(criterion, grid, at, beta=share, log_cutoff=log_cutoff, count=int(-count), kept=int(-kept))
            )
    return tuple(front)


def _best_of_slab(criterion: Criterion, grid: Grid) -> dict[int, _Best]:
    """For every number of images to keep, the best candidate of the grid; numbers that none keeps are left out."""
    n_images = criterion.n_attacked
    scores = score_candidates(criterion, grid, range(1, n_images + 1))
    usable_nG = ~((scores.log_cutoffs > 0) | undeployable_candidates(criterion, grid, scores.log_cutoffs)).flatten(1)
    log_cutoffs_nG, counts_nG, kept_nG = (values.flatten(1) for values in scores)
    candidates = list(grid)
    simplest = sorted(range(len(candidates)), key=lambda i: (candidates[i][1], candidates[i][0], abs(candidates[i][2])))
    left_nG = usable_nG.clone()
    for values_nG in (-counts_nG.double(), -kept_nG.double(), log_cutoffs_nG):  # smaller is better
        masked_nG = values_nG.masked_fill(~left_nG, math.inf)
        left_nG &= masked_nG == masked_nG.amin(dim=1, keepdim=True)
    first_n = left_nG[:, simplest].int().argmax(dim=1)
    found: dict[int, _Best] = {}
    for row in usable_nG.any(dim=1).nonzero().squeeze(1).tolist():
        i = simplest[int(first_n[row])]
        scale, power, bias = candidates[i]
        rank = (
            -float(counts_nG[row, i]), -float(kept_nG[row, i]), float(log_cutoffs_nG[row, i]),
            power, scale, abs(bias),
        )  # fmt: skip
        found[row + 1] = rank, candidates[i]
    return found


def beta_of_robust(robust: float, *, n_robust: int, total: int) -> float:
    """The beta that keeps a share `robust` of all images: rob is robust on `n_robust` of `total`.

    >>> beta_of_robust(0.6, n_robust=609, total=900)
    0.886699507389

    Raises:
        InvalidInputError: for a share that rob itself does not reach.
    """
    needed = math.ceil(Fraction(str(float(robust))) * total)
    if not 0 <= robust <= 1 or needed > n_robust:
        raise InvalidInputError(
            f"robust={robust} cannot be had: rob is robust on {n_robust} of {total} images, a share of "
            f"{n_robust / total:.4g}, and no mixture is asked to keep more"
        )
    return math.floor(needed / n_robust * 1e12) / 1e12  # rounded down: not a hair above the share that is meant


def most_kept_at_clean(front: Sequence[Choice], clean: float, *, total: int) -> Choice:
    """The choice of a front that gets at least a share `clean` of the `total` clean images right and keeps most.

    Raises:
        InvalidInputError: for a share that no candidate reaches.
    """
    needed = math.ceil(Fraction(str(float(clean))) * total)
    reached = [choice for choice in front if choice.objective_count >= needed]
    if not reached:
        most = max((choice.objective_count for choice in front), default=0)
        raise InvalidInputError(
            f"clean={clean} cannot be had: the best candidate gets {most} of {total} clean images right, a share of "
            f"{most / total:.4g}; ask for less or search a wider grid"
        )
    return max(reached, key=lambda choice: choice.kept_predicted)

"""The outcome of a search on its grids: the choice of every beta, the rules by which it is made, and how to widen.

The order of the candidates, on one grid and among several: the best count of the objective; among equals the most
images kept (if the criterion takes the best threshold that keeps at least beta); then the clamp and width that are
configured first, the largest 1 - alpha, the smallest power, the smallest scale and the smallest |bias|.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .choice import Choice
from .criteria import Criterion, Scores
from .grid import AXES, WIDEST, Grid

_KEYS = dict(AXES)
_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOG_FLOAT32_STEP = -24 * math.log(2)  # below this log(1 - q), a float32 q is 1


@dataclass(frozen=True)
class Selection:
    """The outcome of Algorithm 1 on one grid; tensors have the shape (betas, scales, powers, biases), on the CPU."""

    criterion: str
    grid: Grid
    maximized: bool  # whether the objective is maximized
    inequality: bool  # whether the criterion takes the best threshold that keeps at least beta
    objectives: Tensor  # float64; NaN if infeasible, and if undeployable unless the criterion is the paper's
    log_one_minus_cutoffs: Tensor  # float64, log(1 - margin threshold)
    kept: Tensor  # int64: images of the constraint that reach the threshold
    infeasible: Tensor  # bool: the threshold is below 0
    undeployable: Tensor  # bool: float32 could not carry the candidate
    n_attacked: int  # images of the constraint
    n_objective: int  # images of the objective
    chosen: tuple[Choice | None, ...]  # one per beta, None if no candidate is left

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the grid and on the choice of every beta."""
        return notes([self], dict(zip(self.betas, self.chosen, strict=True)))

    @property
    def betas(self) -> tuple[float, ...]:
        """The betas in the order in which they were given."""
        return self.grid.betas

    @property
    def n_undeployable(self) -> int:
        """Candidates that could not be deployed at one beta or more."""
        return int(self.undeployable.any(dim=0).sum())

    def choice(self, beta: float) -> Choice | None:
        """Return the best candidate at a searched beta, None if no candidate can be used."""
        return self.chosen[self.betas.index(beta)]

    def for_beta(self, beta: float) -> Choice:
        """Return the best candidate at `beta`.

        Raises:
            InvalidInputError: if beta was not searched, or if no candidate is left there.
        """
        if beta not in self.betas:
            raise InvalidInputError(f"beta={beta} was not searched; these were: {', '.join(map(str, self.betas))}")
        found = self.choice(beta)
        if found is None:
            i = self.betas.index(beta)
            raise InvalidInputError(
                f"beta={beta}: none of {self.infeasible[i].numel()} candidates can be used: "
                f"{int(self.infeasible[i].sum())} have a threshold below 0 (the transformation itself breaks too many "
                f"attacked images), {int(self.undeployable[i].sum())} have logits, a threshold or a 1 - alpha that "
                "float32 cannot carry; search smaller scales and powers, or a smaller beta"
            )
        return found

    @classmethod
    def of(cls, criterion: Criterion, grid: Grid, scores: Scores) -> "Selection":
        """Exclude and rank the candidates."""
        infeasible = scores.log_cutoffs > 0
        undeployable = undeployable_candidates(criterion, grid, scores.log_cutoffs)
        hidden = infeasible | undeployable if criterion.inequality else infeasible
        usable = ~(infeasible | undeployable)
        return cls(
            criterion.name,
            grid,
            criterion.maximized,
            criterion.inequality,
            objectives=(scores.counts.double() / max(1, len(criterion.clean))).masked_fill(hidden, math.nan),
            log_one_minus_cutoffs=scores.log_cutoffs,
            kept=scores.kept,
            infeasible=infeasible,
            undeployable=undeployable,
            n_attacked=criterion.n_attacked,
            n_objective=len(criterion.clean),
            chosen=tuple(_best(criterion, grid, scores, i, usable[i]) for i in range(len(grid.betas))),
        )


def _best(criterion: Criterion, grid: Grid, scores: Scores, beta: int, left: Tensor) -> Choice | None:
    """Return the best candidate of the beta with this index, of those that are left."""
    if not bool(left.any()):
        return None
    log_cutoffs, counts, kept = (values[beta] for values in scores)
    left = left & (counts == (counts[left].max() if criterion.maximized else counts[left].min()))
    if criterion.inequality:
        left &= kept == kept[left].max()
    left &= log_cutoffs == log_cutoffs[left].min()
    ties = [(grid.powers[p], grid.scales[s], abs(grid.biases[b]), (s, p, b)) for s, p, b in left.nonzero().tolist()]
    s, p, b = index = min(ties)[-1]
    scale, power, bias = grid.scales[s], grid.powers[p], grid.biases[b]
    log_cutoff, count = float(log_cutoffs[index]), int(counts[index])
    cutoff = -math.expm1(log_cutoff)
    return Choice(
        scale,
        power,
        bias,
        alpha=1 / (1 + cutoff),
        one_minus_alpha=cutoff / (1 + cutoff),
        clamp=grid.clamp,
        ln_k=grid.ln_k,
        beta=grid.betas[beta],
        log_one_minus_cutoff=log_cutoff,
        objective=count / max(1, len(criterion.clean)),
        objective_count=count,
        kept_predicted=int(kept[index]),
        n_robust=criterion.n_attacked,
        on_grid_edge=grid.on_edge((scale, power, bias)),
        n_only_rob_right=criterion.only_rob_right(bias),
        n_class_changes=criterion.class_changes(bias),
    )


def undeployable_candidates(criterion: Criterion, grid: Grid, log_cutoffs: Tensor) -> Tensor:
    """Return the candidates whose logits overflow float32, or whose threshold or 1 - alpha it rounds to 1 or 0."""
    largest_B = criterion.largest_inputs(grid.biases).cpu()
    powers_P1 = torch.tensor(grid.powers, dtype=torch.float64)[:, None]
    scales_S11 = torch.tensor(grid.scales, dtype=torch.float64)[:, None, None]
    overflow = scales_S11 * largest_B**powers_P1 > _FLOAT32_MAX
    cutoffs = -torch.expm1(log_cutoffs)
    vanishing = (cutoffs / (1 + cutoffs)).float() == 0
    saturated = log_cutoffs < _LOG_FLOAT32_STEP
    return overflow | ((vanishing | saturated | log_cutoffs.isnan()) & ~(log_cutoffs > 0))


def best_choice(parts: Sequence[Selection], beta: float) -> Choice | None:
    """Return the best candidate of several grids at `beta`, None if none can be used; ties go to the first grid."""
    choices = [choice for part in parts if (choice := part.choice(beta)) is not None]

    def rank(choice: Choice) -> tuple[int, int]:
        count = -choice.objective_count if parts[0].maximized else choice.objective_count
        return count, -choice.kept_predicted if parts[0].inequality else 0

    return min(choices, key=rank, default=None)


def wider_grid(parts: Sequence[Selection], beta: float, n_widen: int) -> Grid | None:
    """Return a wider grid for the clamp and width that are best at `beta`, or None if the search is over.

    A grid grows up to `n_widen` times, each time beyond the edges on which the best candidate of any beta lies.
    """
    best = best_choice(parts, beta)
    if best is None:
        return None
    grid = next(part.grid for part in parts if part.grid.pair == best.pair)
    if grid.widenings >= n_widen:
        return None
    choices = (best_choice(parts, each) for each in grid.betas)
    return grid.wider(*(choice.at for choice in choices if choice and choice.pair == grid.pair))


def notes(parts: Sequence[Selection], choices: Mapping[float, Choice | None]) -> tuple[str, ...]:
    """Report candidates that float32 cannot carry, an empty objective, grid edges, and violated assumptions.

    Args:
        choices: the choice of each beta to report on.
    """
    found = []
    if n_excluded := sum(part.n_undeployable for part in parts):
        n_candidates = sum(part.undeployable[0].numel() for part in parts)
        found.append(
            f"{n_excluded:,} of {n_candidates:,} candidates {'was' if n_excluded == 1 else 'were'} left out at one "
            "beta or more because float32 could not carry their logits, margin threshold or 1 - alpha."
        )
    if parts[0].n_objective == 0:
        found.append("No clean image is wrong: the objective is 0 for every candidate and the ties decided.")
    for beta, choice in choices.items():
        sentences = _choice_notes(choice, parts) if choice else ["no candidate is feasible and deployable."]
        found += [f"beta {beta}: {sentence}" for sentence in sentences]
    return tuple(found)


def _choice_notes(choice: Choice, parts: Sequence[Selection]) -> list[str]:
    part = next(part for part in parts if part.grid.pair == choice.pair)
    found = []
    if choice.beta == 0:
        found.append("nothing is constrained; the margin threshold is the largest margin of any attacked image.")
    if choice.on_grid_edge:
        keys = {name: _KEYS[name] for name in choice.on_grid_edge}
        ends = [f"{name} (at {getattr(choice, name):.3g})" for name in keys]
        listed = " and ".join(f"search.{key}" for key in keys.values())
        found.append(f"the optimum lies on the grid's edge in {', '.join(ends)}; widen {listed}.")
        at_limit = [key for name, key in keys.items() if not part.grid.beyond(key, getattr(choice, name))]
        if at_limit:
            limits = ", ".join(f"{key} {WIDEST[key][0]:g} to {WIDEST[key][1]:g}" for key in at_limit)
            found.append(f"a grid grows by itself no further than {limits}.")
    if choice.n_class_changes:
        found.append(
            f"the transformation changes the class of {choice.n_class_changes} of {part.n_attacked + part.n_objective} "
            "images (assumption 4.2)."
        )
    if choice.n_only_rob_right:
        found.append(
            f"{choice.n_only_rob_right} of {part.n_objective} clean images "
            f"{'is' if choice.n_only_rob_right == 1 else 'are'} right for transformed rob and "
            "wrong for std (assumption 4.1)."
        )
    return found

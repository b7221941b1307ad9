"""What Algorithm 1 answers: the best candidate of every beta, every candidate's numbers, and remarks on them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.transforms import Clamp, LogitTransform
from .candidates import CandidateGrid
from .criteria import Criterion

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOG_FLOAT32_STEP = -24 * math.log(2)  # below this log(1 - q), a float32 q is 1


@dataclass(frozen=True)
class SelectedCandidate:
    """The chosen candidate of one beta."""

    beta: float
    scale: float
    power: float
    bias: float
    alpha: float
    one_minus_alpha: float  # q / (1 + q), accurate where 1 - alpha is not
    cutoff: float
    log_one_minus_cutoff: float
    objective: float
    objective_count: int
    on_grid_edge: tuple[str, ...]  # of "scale", "power", "bias"
    n_undeployable: int  # candidates that were left out at this beta
    n_infeasible: int
    n_only_rob_right: int | None  # violations of assumption 4.1, None where std's classes were not given
    n_class_changes: int  # violations of assumption 4.2
    clamp: Clamp
    ln_k: int | None

    def transform(self) -> LogitTransform:
        """The nonlinear map of this candidate."""
        return LogitTransform(self.scale, self.power, self.bias, self.clamp, self.ln_k)

    def mixing(self) -> tuple[LogitTransform, float, float]:
        """(map, alpha, 1 - alpha): what the closed forms of `prediction` take."""
        return self.transform(), self.alpha, self.one_minus_alpha


@dataclass(frozen=True)
class Selection:
    """The outcome of Algorithm 1; arrays have the shape (betas, scales, powers, biases) and live on the CPU."""

    criterion: str
    grid: CandidateGrid
    objectives: Tensor  # float64
    log_one_minus_cutoffs: Tensor  # float64, log(1 - q)
    infeasible: Tensor  # bool: the cutoff is below 0
    undeployable: Tensor  # bool: float32 could not carry the candidate
    n_attacked: int  # images of the constraint
    n_objective: int  # images of the objective
    chosen: tuple[SelectedCandidate | None, ...]  # one a beta, None where nothing is left
    notes: tuple[str, ...]

    @property
    def betas(self) -> tuple[float, ...]:
        """The betas in the order in which they were given."""
        return self.grid.betas

    @property
    def n_undeployable(self) -> int:
        """Candidates that could not be deployed at one beta or more."""
        return int(self.undeployable.any(dim=0).sum())

    def for_beta(self, beta: float) -> SelectedCandidate:
        """The best candidate at `beta`.

        Raises:
            InvalidInputError: for a beta that was not searched, or one at which no candidate is left.
        """
        if beta not in self.betas:
            raise InvalidInputError(f"beta={beta} was not searched; these were: {', '.join(map(str, self.betas))}")
        found = self.chosen[self.betas.index(beta)]
        if found is None:
            raise InvalidInputError(_nothing_left(self.infeasible, self.undeployable, self.betas.index(beta), beta))
        return found

    @classmethod
    def of(
        cls,
        criterion: Criterion,
        grid: CandidateGrid,
        *,
        ln_k: int | None,
        log_one_minus_cutoffs: Tensor,
        counts: Tensor,
    ) -> "Selection":
        """Excludes, ranks and annotates the candidates."""
        infeasible = log_one_minus_cutoffs > 0
        undeployable = _undeployable(criterion, grid, log_one_minus_cutoffs)
        ranking = _Ranking(criterion, grid, ln_k, log_one_minus_cutoffs, counts, infeasible, undeployable)
        chosen = tuple(ranking.best(i) for i in range(len(grid.betas)))
        return cls(
            criterion.name,
            grid,
            objectives=(counts.double() / max(1, len(criterion.clean))).masked_fill(infeasible, math.nan),
            log_one_minus_cutoffs=log_one_minus_cutoffs,
            infeasible=infeasible,
            undeployable=undeployable,
            n_attacked=len(criterion.attacked),
            n_objective=len(criterion.clean),
            chosen=chosen,
            notes=_notes(criterion, grid, chosen, undeployable),
        )


@dataclass(frozen=True)
class _Ranking:
    """The order of the candidates: objective, then 1 - alpha, then the smaller power, scale and |bias|."""

    criterion: Criterion
    grid: CandidateGrid
    ln_k: int | None
    log_cutoffs: Tensor
    counts: Tensor
    infeasible: Tensor
    undeployable: Tensor

    def best(self, beta: int) -> SelectedCandidate | None:
        """The chosen candidate of the beta with this index."""
        left = ~(self.infeasible[beta] | self.undeployable[beta])
        if not bool(left.any()):
            return None
        counts = self.counts[beta]
        best_count = counts[left].max() if self.criterion.maximised else counts[left].min()
        left = left & (counts == best_count)
        left &= self.log_cutoffs[beta] == self.log_cutoffs[beta][left].min()
        ties: list[list[int]] = left.nonzero().tolist()
        return self._candidate(beta, min(((s, p, b) for s, p, b in ties), key=self._simplicity))

    def _simplicity(self, index: tuple[int, int, int]) -> tuple[float, float, float]:
        scale, power, bias = index
        return self.grid.powers[power], self.grid.scales[scale], abs(self.grid.biases[bias])

    def _candidate(self, beta: int, index: tuple[int, int, int]) -> SelectedCandidate:
        bias = self.grid.biases[index[2]]
        log_cutoff = float(self.log_cutoffs[beta][index])
        cutoff = -math.expm1(log_cutoff)
        count = int(self.counts[beta][index])
        return SelectedCandidate(
            beta=self.grid.betas[beta],
            scale=self.grid.scales[index[0]],
            power=self.grid.powers[index[1]],
            bias=bias,
            alpha=1 / (1 + cutoff),
            one_minus_alpha=cutoff / (1 + cutoff),
            cutoff=cutoff,
            log_one_minus_cutoff=log_cutoff,
            objective=count / max(1, len(self.criterion.clean)),
            objective_count=count,
            on_grid_edge=self.grid.on_edge(index),
            n_undeployable=int(self.undeployable[beta].sum()),
            n_infeasible=int(self.infeasible[beta].sum()),
            n_only_rob_right=self.criterion.only_rob_right(bias),
            n_class_changes=self.criterion.class_changes(bias),
            clamp=self.criterion.clamp,
            ln_k=self.ln_k,
        )


def _undeployable(criterion: Criterion, grid: CandidateGrid, log_cutoffs: Tensor) -> Tensor:
    """Candidates whose logits overflow float32, or whose cutoff or 1 - alpha float32 would round to 1 or 0."""
    largest_B = criterion.largest_inputs(grid.biases).cpu()
    powers_P1 = torch.tensor(grid.powers, dtype=torch.float64)[:, None]
    scales_S11 = torch.tensor(grid.scales, dtype=torch.float64)[:, None, None]
    overflow = scales_S11 * largest_B**powers_P1 > _FLOAT32_MAX
    cutoffs = -torch.expm1(log_cutoffs)
    vanishing = (cutoffs / (1 + cutoffs)).float() == 0
    saturated = log_cutoffs < _LOG_FLOAT32_STEP
    return overflow | ((vanishing | saturated | log_cutoffs.isnan()) & ~(log_cutoffs > 0))


def _nothing_left(infeasible: Tensor, undeployable: Tensor, beta_index: int, beta: float) -> str:
    n_below, n_excluded = int(infeasible[beta_index].sum()), int(undeployable[beta_index].sum())
    return (
        f"beta={beta}: none of {infeasible[beta_index].numel()} candidates can be used: {n_below} have a cutoff below "
        f"0 (the transformation itself breaks too many attacked images), {n_excluded} have logits, a cutoff or a "
        "1 - alpha that float32 cannot carry; search smaller scales and powers, or a smaller beta"
    )


def _notes(
    criterion: Criterion,
    grid: CandidateGrid,
    chosen: tuple[SelectedCandidate | None, ...],
    undeployable: Tensor,
) -> tuple[str, ...]:
    notes = []
    n_excluded = int(undeployable.any(dim=0).sum())
    if n_excluded:
        notes.append(
            f"{n_excluded} of {undeployable[0].numel()} candidates were left out at one beta or more because float32 "
            "could not carry their logits, cutoff or 1 - alpha."
        )
    if len(criterion.clean) == 0:
        notes.append("No clean image is wrong: the objective is 0 for every candidate and the ties decided.")
    for beta, candidate in zip(grid.betas, chosen, strict=True):
        notes += [f"beta {beta}: {sentence}" for sentence in candidate_notes(criterion, candidate)]
    return tuple(notes)


def candidate_notes(criterion: Criterion, candidate: SelectedCandidate | None) -> list[str]:
    """Remarks on the choice of one beta: an optimum on the edge, violated assumptions."""
    if candidate is None:
        return ["no candidate is feasible and deployable."]
    notes = []
    if candidate.beta == 0:
        notes.append("nothing is constrained; the cutoff is the largest margin of any attacked image.")
    if candidate.on_grid_edge:
        notes.append(f"the optimum lies on the grid's edge in {', '.join(candidate.on_grid_edge)}; widen the grid.")
    if candidate.n_class_changes:
        n_images = len(criterion.attacked) + len(criterion.clean)
        notes.append(
            f"the transformation changes the class of {candidate.n_class_changes} of {n_images} images "
            "(assumption 4.2)."
        )
    if candidate.n_only_rob_right:
        notes.append(
            f"{candidate.n_only_rob_right} of {len(criterion.clean)} clean images are right for transformed rob and "
            "wrong for std (assumption 4.1)."
        )
    return notes

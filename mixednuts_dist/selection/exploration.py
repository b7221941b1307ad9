"""A search in parts: several clamps, LayerNorm widths and rounds, with one choice among all of them.

The choice among parts is that within one: the best objective first. Among equals the configured clamp and width come
first, then the order of `Selection`: the largest 1 - alpha, the smallest power, scale and |bias|.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ..mixing.transforms import Clamp
from .candidates import CandidateGrid
from .criteria import Criterion
from .selection_result import SelectedCandidate, Selection, candidate_notes

Pair = tuple[Clamp, int | None]  # a clamp and a LayerNorm width


@dataclass(frozen=True)
class Subgrid:
    """Candidates of one clamp and one LayerNorm width that a round of the search proposes."""

    clamp: Clamp
    ln_k: int | None
    round: int
    grid: CandidateGrid

    @property
    def pair(self) -> Pair:
        return self.clamp, self.ln_k

    def slabs(self) -> list["Subgrid"]:
        """One a bias: all scales and powers there share the clamped logits."""
        return [replace(self, grid=replace(self.grid, biases=(bias,))) for bias in self.grid.biases]


@dataclass(frozen=True)
class Explored:
    """A subgrid with what was found on it."""

    subgrid: Subgrid
    criterion: Criterion
    selection: Selection

    @classmethod
    def of(cls, subgrid: Subgrid, criterion: Criterion, log_cutoffs: Tensor, counts: Tensor) -> "Explored":
        """Ranks the scores of `score_candidates` on the subgrid."""
        selection = Selection.of(
            criterion, subgrid.grid, ln_k=subgrid.ln_k, log_one_minus_cutoffs=log_cutoffs, counts=counts
        )
        return cls(subgrid, criterion, selection)


@dataclass(frozen=True)
class Choice:
    """The best candidate of one beta, and where it was found."""

    candidate: SelectedCandidate
    part: Explored


@dataclass(frozen=True)
class Exploration:
    """All that a search has tried so far; `pairs` in the order in which ties prefer them."""

    pairs: tuple[Pair, ...]
    parts: tuple[Explored, ...] = ()

    def with_parts(self, parts: Iterable[Explored]) -> "Exploration":
        """The same after another round."""
        return replace(self, parts=(*self.parts, *parts))

    def before(self, round_: int) -> "Exploration":
        """What was known before that round."""
        return replace(self, parts=tuple(part for part in self.parts if part.subgrid.round < round_))

    def choice(self, beta: float) -> Choice | None:
        """The best candidate at `beta`, None where none can be used."""
        found = [(part.selection.chosen[part.selection.betas.index(beta)], part) for part in self.parts]
        choices = [Choice(candidate, part) for candidate, part in found if candidate is not None]
        if not choices:
            return None
        best = min(choices, key=self._rank)
        edge = self.axes(best.part.subgrid.pair).on_edge_at(best.candidate)
        return replace(best, candidate=replace(best.candidate, on_grid_edge=edge))

    def axes(self, pair: Pair) -> "Axes":
        """Every value that was tried with this clamp and width."""
        grids = [part.subgrid.grid for part in self.parts if part.subgrid.pair == pair]
        return Axes(
            *(
                tuple(sorted({value for grid in grids for value in getattr(grid, name)}))
                for name in ("scales", "powers", "biases")
            )
        )

    def notes(self, betas: Iterable[float]) -> tuple[str, ...]:
        """Remarks on the search as a whole, and on the choice of every beta."""
        n_excluded = sum(part.selection.n_undeployable for part in self.parts)
        n_candidates = sum(part.selection.objectives[0].numel() for part in self.parts)
        notes = []
        if n_excluded:
            notes.append(
                f"{n_excluded} of {n_candidates} candidates were left out at one beta or more because float32 could "
                "not carry their logits, cutoff or 1 - alpha."
            )
        if self.parts[0].selection.n_objective == 0:
            notes.append("No clean image is wrong: the objective is 0 for every candidate and the ties decided.")
        for beta in betas:
            choice = self.choice(beta)
            criterion = (choice.part if choice else self.parts[0]).criterion
            remarks = candidate_notes(criterion, choice.candidate if choice else None)
            notes += [f"beta {beta}: {sentence}" for sentence in remarks]
        return tuple(notes)

    def _rank(self, choice: Choice) -> tuple[float, ...]:
        found, part = choice.candidate, choice.part
        count = -found.objective_count if part.criterion.maximised else found.objective_count
        preferred = self.pairs.index(part.subgrid.pair)
        return count, preferred, found.log_one_minus_cutoff, found.power, found.scale, abs(found.bias)


@dataclass(frozen=True)
class Axes:
    """Values of scale, power and bias, each ascending."""

    scales: tuple[float, ...]
    powers: tuple[float, ...]
    biases: tuple[float, ...]

    def on_edge_at(self, candidate: SelectedCandidate) -> tuple[str, ...]:
        """Which of scale, power and bias lie at an end of their values, where there are two or more."""
        axes = (("scale", self.scales), ("power", self.powers), ("bias", self.biases))
        return tuple(
            name for name, values in axes if len(values) > 1 and getattr(candidate, name) in (values[0], values[-1])
        )


class Proposer(Protocol):
    """Decides what a search tries next."""

    def propose(self, exploration: Exploration) -> list[Subgrid]:
        """The subgrids of the next round, given all earlier ones; none where the search is over."""
        ...

"""Optuna instead of a grid: a tree-structured Parzen estimator proposes clamps, widths, powers and biases.

Every trial tries all scales at its point: they share the logits' powers, so they cost next to nothing. Trials are asked
for in rounds and told in order; what is proposed depends on the seed alone, not on the workers or an interruption.
"""

from dataclasses import replace

import optuna

from ..selection.exploration import Exploration, Selection
from ..selection.grid import Grid, Pair

_BATCH = 8  # trials a round


class OptunaRounds:
    """Proposes `n_trials` points within the ends of the grid's powers and biases, the best at `beta` in mind."""

    def __init__(
        self, grid: Grid, pairs: tuple[Pair, ...], *, beta: float, n_trials: int, seed: int, maximised: bool
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._grid, self._pairs, self._beta, self._n_trials = grid, pairs, beta, n_trials
        self._study = optuna.create_study(
            direction="maximize" if maximised else "minimize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self._asked: list[optuna.Trial] = []
        self._n_asked = 0

    def propose(self, exploration: Exploration) -> list[Grid]:
        """See `Proposer.propose`."""
        told = exploration.parts[self._n_asked - len(self._asked) : self._n_asked]
        for trial, part in zip(self._asked, told, strict=True):
            self._tell(trial, part)
        self._asked = [self._study.ask() for _ in range(min(_BATCH, self._n_trials - self._n_asked))]
        batch = self._n_asked // _BATCH
        self._n_asked += len(self._asked)
        return [self._grid_at(trial, batch) for trial in self._asked]

    def _grid_at(self, trial: optuna.Trial, batch: int) -> Grid:
        clamp, ln_k = self._pairs[trial.suggest_int("pair", 0, len(self._pairs) - 1)]
        power, bias = (
            trial.suggest_float(name, min(values), max(values))
            for name, values in (("power", self._grid.powers), ("bias", self._grid.biases))
        )
        return replace(self._grid, powers=(power,), biases=(bias,), clamp=clamp, ln_k=ln_k, refinement=batch)

    def _tell(self, trial: optuna.Trial, part: Selection) -> None:
        found = part.choice(self._beta)
        if found is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, found.objective_count)

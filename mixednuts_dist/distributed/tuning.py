"""Algorithm 1 as a Ray Tune job: a trial scores one slab and writes its file.

The logits are put into Ray's object store once. Importing this module imports Ray Tune, which takes two seconds, so the
executor imports it only when there are slabs to score.
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray import tune
from safetensors.torch import save

from ..config.register import require_extensions
from ..config.uris import travelled
from ..errors import MixedNutsError
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid, Pair
from ..selection.selection import score_candidates
from ..storage.store import Store
from .slabs import SearchInputs, SearchTask, read_slab

_ROUNDS = 3
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # its handler would stay and ignore the first Ctrl-C in a later stage
}
_CHATTY = ("ray.tune.analysis.experiment_analysis", "ray.tune.tune", "ray.tune.execution.tune_controller")


class SlabTuner:
    """Scores grids on the connected Ray, their slabs in parallel."""

    def __init__(self, inputs: SearchInputs, task: SearchTask) -> None:
        self._inputs, self._task = ray.put(inputs), task  # once for all rounds
        self._store = Store(task.store_uri)

    def scores(self, grids: Sequence[Grid]) -> list[Scores]:
        """The scores of every candidate of each grid.

        Slab files of an interrupted search are read and not scored again. Another driver of the same run deletes the
        files when its search ends; slabs whose files are gone before they were read here are scored again.

        Raises:
            MixedNutsError: where a trial failed, with its error.
        """
        slabs = [grid.slabs() for grid in grids]
        found = iter(self._slab_scores([slab for part in slabs for slab in part]))
        parts = [[next(found) for _ in part] for part in slabs]
        return [Scores(*(torch.cat(values, dim=-1) for values in zip(*part, strict=True))) for part in parts]

    def _slab_scores(self, slabs: Sequence[Grid]) -> list[Scores]:
        scores: dict[int, Scores | None] = {}
        for fitted in range(_ROUNDS + 1):
            for i, slab in enumerate(slabs):
                scores[i] = scores.get(i) or read_slab(self._store, self._task.path(slab))
            todo = [i for i, score in scores.items() if score is None]
            if not todo:
                break
            if fitted == _ROUNDS:
                address = self._store.address("search")
                raise MixedNutsError(f"{len(todo)} slabs of the search are missing in {address}; run it again")
            run_trials(self._inputs, self._task, [slabs[i] for i in todo])
        return [score for score in scores.values() if score is not None]


class SlabTrial(tune.Trainable):
    """One step scores one slab; Tune reuses the process for the next one."""

    def setup(
        self,
        config: dict[str, Any],
        inputs: SearchInputs | None = None,
        task: SearchTask | None = None,
        slabs: Sequence[Grid] = (),
    ) -> None:
        assert inputs is not None
        assert task is not None
        torch.set_num_threads(1)
        require_extensions(task.extensions, travelled(task.working_folder))
        self.inputs, self.task, self.slabs = inputs, task, slabs
        self.criteria: dict[Pair, Criterion] = {}
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Called by Tune when the process gets another slab."""
        self.slab = self.slabs[int(new_config["slab"])]
        return True

    def step(self) -> dict[str, Any]:
        """Score the slab, write its file, and report its best count."""
        if self.slab.pair not in self.criteria:
            self.criteria = {self.slab.pair: self.inputs.criterion(self.task.criterion, *self.slab.pair)}
        scored = self.criteria[self.slab.pair]
        scores = score_candidates(scored, self.slab)
        content = save({name: values.contiguous() for name, values in scores._asdict().items()})
        Store(self.task.store_uri).write(self.task.path(self.slab), content)
        best = scores.counts.max() if scored.maximised else scores.counts.min()
        return {"count": int(best), "done": True}


def run_trials(inputs: "ray.ObjectRef[SearchInputs]", task: SearchTask, slabs: Sequence[Grid]) -> None:
    """Score each slab in a trial of its own, which writes its file.

    Raises:
        MixedNutsError: where a trial failed, with its error.
    """
    trial = tune.with_parameters(SlabTrial, inputs=inputs, task=task, slabs=slabs)
    with tempfile.TemporaryDirectory(prefix="mixednuts-tune-") as folder, _quiet():
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1}),
            param_space={"slab": tune.grid_search(list(range(len(slabs))))},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig(
                name="search",
                storage_path=folder,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        errors = tuner.fit().errors
    if errors:
        raise MixedNutsError(f"{len(errors)} of {len(slabs)} search trials failed; the first: {errors[0]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Run Tune without its banner, its tables and its warning that its loggers are off."""
    before = {name: logging.getLogger(name).level for name in _CHATTY}
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)

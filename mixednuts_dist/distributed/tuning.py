"""Algorithm 1 as a Ray Tune job: a trial scores one slab, all scales and powers at one bias, clamp and LayerNorm width.

The logits go into the object store once; each trial leaves its scores in a file, so that a restarted search goes on.
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray import tune
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..config import digest
from ..data.store import Store
from ..errors import MissingArtifact, MixedNutsError
from ..mixing.criteria import Criterion
from ..mixing.exploration import Pair, Subgrid
from ..mixing.selection import exact_criterion, paper_criterion, score_candidates
from ..mixing.transforms import Clamp, layer_norm_logits

logger = logging.getLogger(__name__)

_ROUNDS = 3
_QUIET = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
_CHATTY = ("ray.tune.analysis.experiment_analysis", "ray.tune.tune", "ray.tune.execution.tune_controller")


@dataclass(frozen=True)
class SearchInputs:
    """The cached logits of a run as numpy arrays, which Ray shares between processes without a copy."""

    labels_N: np.ndarray[Any, Any]
    std_clean_NK: np.ndarray[Any, Any]
    rob_clean_NK: np.ndarray[Any, Any]
    rob_attacked_NK: np.ndarray[Any, Any]

    def criterion(self, name: str, clamp: Clamp, ln_k: int | None) -> Criterion:
        """The images that the constraint and the objective count, for the criterion "exact" or "paper"."""
        labels, clean = _tensor(self.labels_N), _tensor(self.rob_clean_NK)
        attacked, std_pred = _tensor(self.rob_attacked_NK), _tensor(self.std_clean_NK).argmax(dim=1)
        if name == "exact":
            return exact_criterion(attacked, labels, clean, labels, std_pred, clamp=clamp, ln_k=ln_k)
        survived = layer_norm_logits(attacked, ln_k).argmax(dim=1) == labels
        wrong = layer_norm_logits(clean, ln_k).argmax(dim=1) != labels
        return paper_criterion(attacked[survived], clean[wrong], clamp=clamp, ln_k=ln_k)


@dataclass(frozen=True)
class SearchTask:
    """What all trials of one search have in common; `fingerprint` is in the name of every slab file."""

    store_uri: str
    fingerprint: str
    criterion: str

    def path(self, slab: Subgrid) -> str:
        """The file of a slab's scores; whatever round asks for the same candidates finds it."""
        grid = slab.grid
        asked = {"pair": slab.pair, "scales": grid.scales, "powers": grid.powers, "biases": grid.biases}
        return f"search/slab-{self.fingerprint}-{digest(asked)}.safetensors"


class SlabTrial(tune.Trainable):
    """One step scores one slab; Tune reuses the process for the next one."""

    def setup(
        self,
        config: dict[str, Any],
        inputs: SearchInputs | None = None,
        task: SearchTask | None = None,
        slabs: Sequence[Subgrid] = (),
    ) -> None:
        assert inputs is not None
        assert task is not None
        torch.set_num_threads(1)
        self.inputs, self.task, self.slabs = inputs, task, slabs
        self.criteria: dict[Pair, Criterion] = {}
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Tune hands this process another slab."""
        self.slab = self.slabs[int(new_config["slab"])]
        return True

    def step(self) -> dict[str, Any]:
        """Score the slab, leave its file, and report its best count."""
        if self.slab.pair not in self.criteria:
            self.criteria = {self.slab.pair: self.inputs.criterion(self.task.criterion, *self.slab.pair)}
        scored = self.criteria[self.slab.pair]
        log_cutoffs, counts = score_candidates(scored, self.slab.grid)
        content = save({"log_cutoffs": log_cutoffs.contiguous(), "counts": counts.contiguous()})
        Store(self.task.store_uri).write(self.task.path(self.slab), content)
        best = counts.max() if scored.maximised else counts.min()
        return {"count": int(best), "done": True}


class SlabTuner:
    """Scores subgrids on the connected Ray, their slabs in parallel."""

    def __init__(self, inputs: SearchInputs, task: SearchTask) -> None:
        self._inputs, self._task = ray.put(inputs), task  # once for all rounds
        self._store = Store(task.store_uri)

    def scores(self, subgrids: Sequence[Subgrid]) -> list[tuple[Tensor, Tensor]]:
        """`log(1 - cutoff)` and the count of every candidate of each subgrid, shape (betas, scales, powers, biases).

        Slabs that an interrupted search has left are taken as they are. Another driver of the same run deletes them
        once it has finished; what it takes away before it is read here is scored again.

        Raises:
            MixedNutsError: where a trial failed, with its error.
        """
        slabs = [subgrid.slabs() for subgrid in subgrids]
        found = iter(self._slab_scores([slab for part in slabs for slab in part]))
        scores = []
        for part in slabs:
            log_cutoffs, counts = zip(*(next(found) for _ in part), strict=True)
            scores.append((torch.cat(log_cutoffs, dim=-1), torch.cat(counts, dim=-1)))
        return scores

    def _slab_scores(self, slabs: Sequence[Subgrid]) -> list[tuple[Tensor, Tensor]]:
        scores: dict[int, tuple[Tensor, Tensor] | None] = {}
        for fitted in range(_ROUNDS + 1):
            for i, slab in enumerate(slabs):
                scores[i] = scores.get(i) or _read_slab(self._store, self._task.path(slab))
            todo = [i for i, score in scores.items() if score is None]
            if not todo:
                break
            if fitted == _ROUNDS:
                address = self._store.address("search")
                raise MixedNutsError(f"{len(todo)} slabs of the search are missing in {address}; run it again")
            self._fit([slabs[i] for i in todo])
        return [score for score in scores.values() if score is not None]

    def _fit(self, slabs: list[Subgrid]) -> None:
        trial = tune.with_parameters(SlabTrial, inputs=self._inputs, task=self._task, slabs=slabs)
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


def delete_slabs(store: Store) -> None:
    """Remove the trials' files once the candidates' table holds their content."""
    for name in store.names("search"):
        if name.startswith("slab-"):
            store.delete(f"search/{name}")


def _read_slab(store: Store, path: str) -> tuple[Tensor, Tensor] | None:
    try:
        tensors = load(store.read(path))
        return tensors["log_cutoffs"], tensors["counts"]
    except MissingArtifact:
        return None
    except (SafetensorError, KeyError):
        logger.warning("%s is damaged; the slab is scored again", store.address(path))
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Tune without its banner, its tables and its complaint that the loggers, which nobody reads, are off."""
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


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.copy())

"""Algorithm 1 as a Ray Tune job: a trial scores one slab of the grid, all scales and powers at one bias.

The logits go into the object store once; each trial leaves its scores in a file, so that a restarted search goes on.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ray import tune
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..data.store import Store
from ..errors import MixedNutsError
from ..mixing.candidates import CandidateGrid
from ..mixing.criteria import Criterion
from ..mixing.selection import exact_criterion, paper_criterion, score_candidates
from ..mixing.transforms import Clamp, layer_norm_logits

logger = logging.getLogger(__name__)

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
class SlabTask:
    """What all trials of one search have in common; `fingerprint` is in the name of every slab file."""

    store_uri: str
    fingerprint: str
    criterion: str
    clamp: Clamp
    ln_k: int | None
    grid: CandidateGrid

    def path(self, slab: int) -> str:
        return f"search/slab-{self.fingerprint}-{slab:05d}.safetensors"


class SlabTrial(tune.Trainable):
    """One step scores one slab; Tune reuses the process for the next one."""

    def setup(self, config: dict[str, Any], inputs: SearchInputs | None = None, task: SlabTask | None = None) -> None:
        assert inputs is not None
        assert task is not None
        torch.set_num_threads(1)
        self.task, self.slab = task, int(config["slab"])
        self.scored = inputs.criterion(task.criterion, task.clamp, task.ln_k)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Tune hands this process another slab."""
        self.slab = int(new_config["slab"])
        return True

    def step(self) -> dict[str, Any]:
        """Score the slab, leave its file, and report its best count."""
        grid = replace(self.task.grid, biases=(self.task.grid.biases[self.slab],))
        log_cutoffs, counts = score_candidates(self.scored, grid)
        content = save({"log_cutoffs": log_cutoffs.contiguous(), "counts": counts.contiguous()})
        Store(self.task.store_uri).write(self.task.path(self.slab), content)
        best = counts.max() if self.scored.maximised else counts.min()
        return {"count": int(best), "done": True}


def tune_slabs(inputs: SearchInputs, task: SlabTask) -> tuple[Tensor, Tensor]:
    """`log(1 - cutoff)` and the count of every candidate, shape (betas, scales, powers, biases); needs Ray.

    Slabs that an interrupted search has left are taken as they are.

    Raises:
        MixedNutsError: where a trial failed, with its error.
    """
    store = Store(task.store_uri)
    slabs = range(len(task.grid.biases))
    todo = [slab for slab in slabs if _read_slab(store, task.path(slab)) is None]
    if todo:
        _fit(inputs, task, todo)
    scores = []
    for slab in slabs:
        score = _read_slab(store, task.path(slab))
        if score is None:
            raise MixedNutsError(f"the search's slab {slab} is missing: {store.address(task.path(slab))}; run it again")
        scores.append(score)
    return torch.cat([score[0] for score in scores], dim=-1), torch.cat([score[1] for score in scores], dim=-1)


def delete_slabs(store: Store) -> None:
    """Remove the trials' files once the candidates' table holds their content."""
    for name in store.names("search"):
        if name.startswith("slab-"):
            store.delete(f"search/{name}")


def _fit(inputs: SearchInputs, task: SlabTask, todo: list[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="mixednuts-tune-") as folder, _quiet():
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(SlabTrial, inputs=inputs, task=task), {"cpu": 1}),
            param_space={"slab": tune.grid_search(todo)},
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
        raise MixedNutsError(f"{len(errors)} of {len(todo)} search trials failed; the first: {errors[0]}")


def _read_slab(store: Store, path: str) -> tuple[Tensor, Tensor] | None:
    if not store.exists(path):
        return None
    try:
        tensors = load(store.read(path))
        return tensors["log_cutoffs"], tensors["counts"]
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

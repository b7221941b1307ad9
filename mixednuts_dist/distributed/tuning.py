"""Algorithm 1 as a Ray Tune job: a trial scores one slab, all scales and powers at one bias, clamp and LayerNorm width.

The logits go into the object store once; each trial leaves its scores in a file, so that a restarted search goes on.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..config import digest
from ..errors import MissingArtifact, MixedNutsError
from ..mixing.clamps import Clamp
from ..register import CRITERIA
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
from ..storage.store import Store

logger = logging.getLogger(__name__)

_ROUNDS = 3


@dataclass(frozen=True)
class SearchInputs:
    """The cached logits of a run as numpy arrays, which Ray shares between processes without a copy."""

    labels_N: np.ndarray[Any, Any]
    std_clean_NK: np.ndarray[Any, Any]
    rob_clean_NK: np.ndarray[Any, Any]
    rob_attacked_NK: np.ndarray[Any, Any]

    def criterion(self, name: str, clamp: Clamp, ln_k: int | None) -> Criterion:
        """A registered criterion on these rows."""
        criterion: Criterion = CRITERIA.get(name).from_rows(self.rows(), clamp=clamp, ln_k=ln_k)
        return criterion

    def rows(self) -> CachedLogits:
        """The same as tensors."""
        std_pred_N = _tensor(self.std_clean_NK).argmax(dim=1)
        return CachedLogits(
            _tensor(self.rob_clean_NK), _tensor(self.rob_attacked_NK), _tensor(self.labels_N), std_pred_N
        )


@dataclass(frozen=True)
class SearchTask:
    """What all trials of one search have in common; `fingerprint` is in the name of every slab file."""

    store_uri: str
    fingerprint: str
    criterion: str

    def path(self, slab: Grid) -> str:
        """The file of a slab's scores; whatever refinement asks for the same candidates finds it."""
        asked = {"pair": slab.pair, "scales": slab.scales, "powers": slab.powers, "biases": slab.biases}
        return f"search/slab-{self.fingerprint}-{digest(asked)}.safetensors"


class SlabTuner:
    """Scores grids on the connected Ray, their slabs in parallel."""

    def __init__(self, inputs: SearchInputs, task: SearchTask) -> None:
        self._inputs, self._task = ray.put(inputs), task  # once for all rounds
        self._store = Store(task.store_uri)

    def scores(self, grids: Sequence[Grid]) -> list[Scores]:
        """The scores of every candidate of each grid.

        Slabs that an interrupted search has left are taken as they are. Another driver of the same run deletes them
        once it has finished; what it takes away before it is read here is scored again.

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
                scores[i] = scores.get(i) or _read_slab(self._store, self._task.path(slab))
            todo = [i for i, score in scores.items() if score is None]
            if not todo:
                break
            if fitted == _ROUNDS:
                address = self._store.address("search")
                raise MixedNutsError(f"{len(todo)} slabs of the search are missing in {address}; run it again")
            self._run_trials([slabs[i] for i in todo])
        return [score for score in scores.values() if score is not None]

    def _run_trials(self, slabs: list[Grid]) -> None:
        from .slab_trials import run_trials  # Tune takes two seconds to import, and most commands find the search done

        run_trials(self._inputs, self._task, slabs)


def delete_slabs(store: Store) -> None:
    """Remove the trials' files once the candidates' table holds their content."""
    for name in store.names("search"):
        if name.startswith("slab-"):
            store.delete(f"search/{name}")


def _read_slab(store: Store, path: str) -> Scores | None:
    try:
        tensors = load(store.read(path))
        return Scores(*(tensors[name] for name in Scores._fields))
    except MissingArtifact:
        return None
    except (SafetensorError, KeyError):
        logger.warning("%s is damaged; the slab is scored again", store.address(path))
        return None


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.copy())

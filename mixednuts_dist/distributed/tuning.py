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
from ..mixing.transforms import Clamp, layer_norm_logits
from ..selection.criteria import Criterion
from ..selection.exploration import Subgrid
from ..selection.selection import exact_criterion, paper_criterion
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
            self._run_trials([slabs[i] for i in todo])
        return [score for score in scores.values() if score is not None]

    def _run_trials(self, slabs: list[Subgrid]) -> None:
        from .slab_trials import run_trials  # Tune takes two seconds to import, and most commands find the search done

        run_trials(self._inputs, self._task, slabs)


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


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.copy())

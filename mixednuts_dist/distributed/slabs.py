"""What the trials of a search work on and leave: the cached logits, and a file of scores for each slab.

A slab is all scales and powers at one bias, clamp and LayerNorm width. Its file is what an interrupted search goes on
from.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..config import digest
from ..errors import MissingArtifact
from ..mixing.transforms import Clamp, layer_norm_logits
from ..selection.criteria import Criterion
from ..selection.exploration import Subgrid
from ..selection.selection import exact_criterion, paper_criterion
from ..storage.store import Store

logger = logging.getLogger(__name__)


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


def delete_slabs(store: Store) -> None:
    """Remove the trials' files once the candidates' table holds their content."""
    for name in store.names("search"):
        if name.startswith("slab-"):
            store.delete(f"search/{name}")


def read_slab(store: Store, path: str) -> tuple[Tensor, Tensor] | None:
    """The scores of a slab that was done before; None where they are missing or damaged."""
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

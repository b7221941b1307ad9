"""What the driver sends to the trials of a search: the cached logits, and what to score.

A trial scores a slab: all scales and powers at one bias, clamp and LayerNorm width. The file of scores that it leaves
is what an interrupted search goes on from.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..config.register import CRITERIA
from ..config.run_config import digest
from ..errors import MissingArtifact
from ..mixing.clamps import Clamp
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
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
    extensions: Mapping[str, str] = field(default_factory=dict)  # the user's files -> sha256, as the driver saw them
    working_folder: str = ""  # the driver's

    def path(self, slab: Grid) -> str:
        """The file of a slab's scores; whatever refinement asks for the same candidates finds it."""
        asked = {"pair": slab.pair, "scales": slab.scales, "powers": slab.powers, "biases": slab.biases}
        return f"search/slab-{self.fingerprint}-{digest(asked)}.safetensors"


def delete_slabs(store: Store) -> None:
    """Remove the trials' files once the candidates' table holds their content."""
    for name in store.names("search"):
        if name.startswith("slab-"):
            store.delete(f"search/{name}")


def read_slab(store: Store, path: str) -> Scores | None:
    """The scores of a slab that was done before; None where they are missing or damaged."""
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

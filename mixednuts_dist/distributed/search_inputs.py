"""The cached logits and the criterion of a search, as the driver sends them to its trials."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.register import CRITERIA
from ..mixing.clamps import Clamp
from ..selection.criteria import Criterion
from ..selection.inputs import CachedLogits


@dataclass(frozen=True)
class SearchInputs:
    """The cached logits of a run as numpy arrays, which Ray shares between processes without a copy."""

    labels_N: np.ndarray[Any, Any]
    std_clean_NK: np.ndarray[Any, Any]
    rob_clean_NK: np.ndarray[Any, Any]
    rob_attacked_NK: np.ndarray[Any, Any]

    def criterion(self, name: str, clamp: Clamp, ln_k: int | None) -> Criterion:
        """Return a registered criterion on these rows."""
        criterion: Criterion = CRITERIA.get(name).from_rows(self.rows(), clamp=clamp, ln_k=ln_k)
        return criterion

    def rows(self) -> CachedLogits:
        """Return the same as tensors."""
        std_pred_N = _tensor(self.std_clean_NK).argmax(dim=1)
        return CachedLogits(
            _tensor(self.rob_clean_NK), _tensor(self.rob_attacked_NK), _tensor(self.labels_N), std_pred_N
        )


@dataclass(frozen=True)
class SearchTask:
    """The settings that all trials of a search share."""

    store_uri: str
    content_hash: str
    criterion: str
    extensions: Mapping[str, str] = field(default_factory=dict)  # the user's files -> sha256 on the driver
    working_folder: str = ""  # the driver's


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values.copy())

"""What the driver tells a worker: the run, what a stage asks of each partition, and what a search asks of its trials.

A trial scores a slab: all scales and powers at one bias, clamp and LayerNorm width. The file of scores that it leaves
is what an interrupted search goes on from.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..acceleration.arithmetic import PrecisionChoice
from ..attacks.budget import AttackBudget
from ..attacks.gradient_model import AttackMode
from ..config import digest
from ..errors import MissingArtifact
from ..mixing.clamps import Clamp
from ..mixing.mixture import Mixture
from ..mixing.transforms import LogitMap
from ..register import CRITERIA
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
from ..storage.partitions import Sample
from ..storage.store import Store
from ..threat import ThreatModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know of the run."""

    store_uri: str
    data_uri: str
    std_uri: str | None  # None: rob is attacked alone
    rob_uri: str
    checksums: Mapping[str, str]  # of "labels", "std" and "rob", as the driver saw them
    threat: ThreatModel
    seed: int
    ln_k: int | None
    batch_size: int | Literal["auto"]
    n_threads: int
    precision: PrecisionChoice = "fp32"
    compile: bool = False
    extensions: Mapping[str, str] = field(default_factory=dict)  # the user's files -> sha256, as the driver saw them

    @property
    def run_id(self) -> str:
        return self.store_uri.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class StoredPoints:
    """Attacked images that an earlier stage has left: columns of its files, one row an image."""

    stage: str
    fingerprint: str
    columns: tuple[str, ...] = ("x_adv",)


@dataclass(frozen=True)
class Task:
    """What a stage asks of each partition."""

    stage: str  # the folder of its files
    fingerprint: str  # of all that its rows depend on
    budget: AttackBudget


@dataclass(frozen=True)
class AttackTask(Task):
    """MMAA on rob, and the plain APGD pair on std."""

    stop_when_broken: bool = True
    method: str = "apgd"  # or "square", which asks rob for no gradient
    logit_map: LogitMap | None = None  # what rob's logits pass through under attack; LayerNorm by default


@dataclass(frozen=True)
class EvaluateTask(Task):
    """The adaptive AutoAttack on a mixture; plain AutoAttack on rob alone where there is none."""

    attacks: tuple[str, ...] = ()
    mixture: Mixture | None = None
    mode: AttackMode = "transfer"
    surrogate_alpha: float = 0.5  # alpha_d and r_d of f_aux
    rd: float = 0.9
    points: tuple[StoredPoints, ...] = ()  # tried before any attack


@dataclass(frozen=True)
class CheckTask(EvaluateTask):
    """A second opinion: the unmodified pyautoattack on the classifier that an `EvaluateTask` has attacked."""

    chosen: frozenset[int] = frozenset()  # sample ids of the images that it attacks


@dataclass(frozen=True)
class RoundTask(Task):
    """The attack of a search round on each of its mixtures, on images that rob keeps and that they stand on.

    `points` begin with the attack stage's, whose rows say what rob keeps; `sample` are the images that the search
    reads, where those are not all.
    """

    mixtures: tuple[Mixture, ...]
    reaches: tuple[float, ...]  # of each: images whose log(1 - margin) of M(rob) is below it are too far to change
    attacks: tuple[str, ...]
    mode: AttackMode
    surrogate_alpha: float
    rd: float
    points: tuple[StoredPoints, ...]
    sample: Sample | None = None


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

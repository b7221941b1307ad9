"""The description of a run that every worker gets, and what a worker reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..config.threat import ThreatModel
from ..config.uris import ClassifierSource, DatasetSource, travelled

if TYPE_CHECKING:  # commands that only look at a run do not import PyTorch
    from ..acceleration.precision import PrecisionChoice


class Place(NamedTuple):
    """Where a worker runs: a node, or some GPUs of a node."""

    node: str
    gpus: str = ""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds per image in a full batch."""

    forward: float
    both: float  # forward and backward

    def of(self, n_forward: int, n_backward: int) -> float:
        """Return the seconds per image for these numbers of passes; each backward pass includes a forward pass."""
        return (n_forward - n_backward) * self.forward + n_backward * self.both


@dataclass(frozen=True)
class WorkerSpec:
    """The inputs and settings of a run, as the driver found them."""

    store_uri: str  # where the rows are stored
    data: DatasetSource
    threat: ThreatModel
    checksums: Mapping[str, str]  # "labels", "std", "rob" -> checksum on the driver
    classifiers: Mapping[str, ClassifierSource] = field(default_factory=dict)  # "std" if the run has one, and "rob"
    seed: int = 0
    ln_k: int | None = None
    batch_size: int | Literal["auto"] = 1
    n_threads: int = 1
    precision: PrecisionChoice = "fp32"
    compile: bool = False
    random: bool = False  # whether the classifiers are random (`evaluate.eot`)
    n_classes: int | None = None  # None if the driver has not run the classifiers
    working_folder: str = ""  # the driver's working folder, in which relative paths start
    extensions: Mapping[str, str] = field(default_factory=dict)  # the user's files -> sha256 on the driver
    run: str = ""  # the folder of the run's own files, below `store_uri`

    def here(self) -> WorkerSpec:
        """Return the specification with the paths of the images and classifiers on this machine."""
        find = travelled(self.working_folder)
        classifiers = {role: source.located(find) for role, source in self.classifiers.items()}
        return replace(self, data=self.data.located(find), classifiers=classifiers)

    @property
    def run_uri(self) -> str:
        """Return the folder or URI of the run's own files."""
        return f"{self.store_uri.rstrip('/')}/{self.run}".rstrip("/")

    @property
    def run_id(self) -> str:
        """Return the name of the run's folder."""
        return self.run_uri.rpartition("/")[2]

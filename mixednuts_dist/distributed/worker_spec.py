"""The description of a run that every worker gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..config.threat import ThreatModel
from ..config.uris import placed, travelled

if TYPE_CHECKING:  # commands that only look at a run do not import PyTorch
    from ..acceleration.precision import PrecisionChoice


class Place(NamedTuple):
    """Where a worker runs: a node, or some GPUs of a node."""

    node: str
    gpus: str = ""


@dataclass(frozen=True)
class WorkerSpec:
    """The inputs and settings of a run, as the driver found them."""

    store_uri: str  # where the rows are stored
    data_uri: str
    std_uri: str | None  # None if the robust classifier is attacked alone
    rob_uri: str | None  # None for a worker without classifiers
    checksums: Mapping[str, str]  # "labels", "std", "rob" -> checksum on the driver
    threat: ThreatModel
    seed: int
    ln_k: int | None
    batch_size: int | Literal["auto"]
    n_threads: int
    precision: PrecisionChoice = "fp32"
    compile: bool = False
    random: bool = False  # the classifiers need not repeat their logits
    n_classes: int | None = None  # None if the driver has not run the classifiers
    working_folder: str = ""  # the driver's, to which relative paths are relative
    extensions: Mapping[str, str] = field(default_factory=dict)  # the user's files -> sha256 on the driver
    run: str = ""  # the folder of the run's own files, below `store_uri`
    n_workers: int = 1  # workers that start together and load from the same storage
    objects: Mapping[str, Any] = field(default_factory=dict, repr=False)  # modules and a dataset instead of URIs

    @property
    def uris(self) -> dict[str, str]:
        """Return role ("std" if the run has one, "rob") -> URI on this machine."""
        uris = (("std", self.std_uri), ("rob", self.rob_uri))
        return {role: self.placed(uri) for role, uri in uris if uri is not None}

    def placed(self, uri: str) -> str:
        """Return a URI whose files are found on this machine."""
        return placed(uri, travelled(self.working_folder))

    @property
    def run_uri(self) -> str:
        """Return the folder or URI of the run's own files."""
        return f"{self.store_uri.rstrip('/')}/{self.run}".rstrip("/")

    @property
    def run_id(self) -> str:
        """Return the name of the run's folder."""
        return self.run_uri.rpartition("/")[2]

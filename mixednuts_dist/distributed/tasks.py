"""What the driver tells a worker: the run, and what a stage asks of each partition."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..acceleration.arithmetic import PrecisionChoice
from ..attacks.budget import AttackBudget
from ..attacks.gradient_model import AttackMode
from ..mixing.mixture import Mixture
from ..mixing.transforms import LogitMap
from ..threat import ThreatModel


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
class RoundTask(Task):
    """The attack of a search round on each of its mixtures, on images that rob keeps and that they stand on.

    `points` begin with the attack stage's, whose rows say what rob keeps.
    """

    mixtures: tuple[Mixture, ...]
    reaches: tuple[float, ...]  # of each: images whose log(1 - margin) of M(rob) is below it are too far to change
    attacks: tuple[str, ...]
    mode: AttackMode
    surrogate_alpha: float
    rd: float
    points: tuple[StoredPoints, ...]

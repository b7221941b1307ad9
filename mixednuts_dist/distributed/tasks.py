"""What the driver tells a worker: the run, and what a stage asks of each partition."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..acceleration.arithmetic import PrecisionChoice
from ..attacks.adaptive import AttackBudget
from ..mixing.mixture import Mixture
from ..mixing.transforms import LogitMap
from ..storage.records import SearchResult
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

    @property
    def run_id(self) -> str:
        return self.store_uri.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class AttackTask:
    """What the attack stage asks of each partition."""

    fingerprint: str
    n_iter: int
    n_target_classes: int
    stop_when_broken: bool
    border_restarts: int = 2
    stage: str = "attack"
    method: str = "apgd"  # or "square", which asks rob for no gradient
    n_queries: int = 5000  # of method square
    logit_map: LogitMap | None = None  # what rob's logits pass through under attack; LayerNorm by default


@dataclass(frozen=True)
class EvaluateTask:
    """What the evaluate stage asks of each partition."""

    fingerprint: str
    attack_fingerprint: str  # of the cached attacked images
    search: SearchResult | None  # None: plain AutoAttack on rob alone
    attacks: tuple[str, ...]
    mode: str
    budget: AttackBudget
    rd: float
    stage: str = "evaluate"
    mixture: Mixture | None = None  # in place of the one that the search chose

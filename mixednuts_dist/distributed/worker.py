"""One worker: it owns an accelerator (or its share of the cores) and turns partitions into files.

A plain class, so that it can be run and debugged without a cluster; the last line makes it an actor.

Shapes: B images of a partition, K classes.
"""

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor, nn

from ..attacks.adaptive import AttackBudget, AttackOutcome, adaptive_autoattack, autoattack
from ..attacks.minimum_margin import MinimumMarginResult, minimum_margin_attack
from ..attacks.victim import Victim, judged_logits
from ..data.base_classifiers import classifier_checksum, load_classifier
from ..data.datasets import open_dataset
from ..data.partitions import Partition
from ..data.records import Receipt, SearchResult
from ..data.store import Store
from ..data.tables import SURVIVED, encode_table, read_columns
from ..errors import BaseClassifierError
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitTransform, layer_norm_logits
from ..threat import ThreatModel

STD_ATTACKS = ("apgd-ce", "apgd-t")  # what std's robust accuracy is measured under


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know of the run."""

    store_uri: str
    data_uri: str
    std_uri: str
    rob_uri: str
    checksums: Mapping[str, str]  # of "std" and "rob", as the driver saw them
    threat: ThreatModel
    seed: int
    ln_k: int | None
    batch_size: int
    n_threads: int


@dataclass(frozen=True)
class AttackTask:
    """What the attack stage asks of each partition."""

    fingerprint: str
    n_iter: int
    n_target_classes: int
    stop_when_broken: bool
    border_restarts: int = 2
    stage: str = "attack"


@dataclass(frozen=True)
class EvaluateTask:
    """What the evaluate stage asks of each partition."""

    fingerprint: str
    attack_fingerprint: str  # of the cached attacked images
    search: SearchResult
    attacks: tuple[str, ...]
    mode: str
    budget: AttackBudget
    rd: float
    stage: str = "evaluate"


class AttackWorker:
    """Loads the base classifiers once and then attacks one partition after the other."""

    def __init__(self, spec: WorkerSpec) -> None:
        # Nothing here may fail: an exception in an actor's constructor cannot be told from a lost machine.
        self.spec = spec

    def ready(self) -> str:
        """Load everything; returns the node's name.

        Raises:
            BaseClassifierError: where this machine's weights are not the ones that the driver saw.
        """
        torch.set_num_threads(self.spec.n_threads)
        self.device = _device()
        self.dataset = open_dataset(self.spec.data_uri)
        self.std = self._classifier(self.spec.std_uri, "std")
        self.rob = self._classifier(self.spec.rob_uri, "rob")
        self.store = Store(self.spec.store_uri)
        return platform.node()

    def _classifier(self, uri: str, role: str) -> nn.Module:
        model = load_classifier(uri, role)
        found, expected = classifier_checksum(model, uri), self.spec.checksums[role]
        if found != expected:
            raise BaseClassifierError(
                f"{role}={uri!r} on {platform.node()} has checksum {found[:12]}, the run has {expected[:12]}: "
                "this machine holds other weights; copy the same files to every node"
            )
        return model.to(self.device)

    def process(self, partition: Partition, task: AttackTask | EvaluateTask) -> Receipt:
        """Attack one partition, write its file, and report."""
        started = time.perf_counter()
        x, y = self.dataset.read(partition.start, partition.stop)
        x, y = x.to(self.device), y.to(self.device)
        if isinstance(task, AttackTask):
            columns, summary = self._attack(partition, x, y, task)
        else:
            columns, summary = self._evaluate(partition, x, y, task)
        receipt = Receipt(
            stage=task.stage, partition=partition.index, start=partition.start, stop=partition.stop,
            seconds=time.perf_counter() - started, node=platform.node(), **summary,
        )  # fmt: skip
        ids = torch.arange(partition.start, partition.stop)
        content = encode_table({"sample_id": ids, "label": y, **columns}, task.fingerprint, receipt)
        self.store.write(f"{task.stage}/{partition.file_name}", content)
        return receipt

    def _attack(
        self, partition: Partition, x: Tensor, y: Tensor, task: AttackTask
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """MMAA on LayerNormed rob, and the plain APGD pair on std."""
        ids, batch = range(partition.start, partition.stop), self.spec.batch_size
        found = minimum_margin_attack(
            lambda images: layer_norm_logits(self.rob(images), ln_k=self.spec.ln_k), x, y,
            threat=self.spec.threat, n_iter=task.n_iter, n_target_classes=task.n_target_classes,
            seed=self.spec.seed, stop_when_broken=task.stop_when_broken,
            border_restarts=task.border_restarts, sample_ids=ids, batch_size=batch,
        )  # fmt: skip
        budget = AttackBudget(task.n_iter, task.n_target_classes, batch_size=batch)
        std = autoattack(
            self.std, x, y, threat=self.spec.threat, attacks=STD_ATTACKS,
            seed=self.spec.seed, sample_ids=ids, budget=budget,
        )  # fmt: skip
        return self._attack_columns(x, y, found, std)

    def _attack_columns(
        self, x: Tensor, y: Tensor, found: MinimumMarginResult, std: AttackOutcome
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        rob_clean = self._logits(self.rob, x)
        columns = {
            "std_clean": self._logits(self.std, x),
            "rob_clean": rob_clean,
            "rob_attacked": self._logits(self.rob, found.x_adv),
            "margin": found.margin,
            "log_one_minus_margin": found.log_one_minus_margin,
            "std_broken": ~std.robust,
            "rob_broken": found.broken,
            "x_adv": found.x_adv,
        }
        summary = {
            "clean_correct": int((rob_clean.argmax(dim=1) == y).sum()),
            "robust": int((~found.broken).sum()),
            "n_forward": found.n_forward + std.n_forward,
            "n_backward": found.n_backward + std.n_backward,
        }
        return columns, summary

    def _evaluate(
        self, partition: Partition, x: Tensor, y: Tensor, task: EvaluateTask
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The adaptive AutoAttack on the mixture that the search chose."""
        mixed = self._mixed(task)
        cached = read_columns(self.store, "attack", [partition], task.attack_fingerprint, ["x_adv"])["x_adv"]
        outcome = adaptive_autoattack(
            mixed, x, y, threat=self.spec.threat, attacks=task.attacks, mode=task.mode, seed=self.spec.seed,
            cached_BCHW=cached.to(self.device), sample_ids=range(partition.start, partition.stop), budget=task.budget,
        )  # fmt: skip
        clean = self._logits(mixed, x)
        columns = {
            "mixed_clean": clean,
            "mixed_attacked": outcome.logits,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            "x_adv": outcome.x_adv,
        }
        summary = {
            "clean_correct": int((clean.argmax(dim=1) == y).sum()),
            "robust": int(outcome.robust.sum()),
            "n_forward": outcome.n_forward,
            "n_backward": outcome.n_backward,
        }
        return columns, summary

    def _mixed(self, task: EvaluateTask) -> MixedClassifier:
        chosen, search = task.search.deployed(), task.search
        transform = LogitTransform(chosen.scale, chosen.power, chosen.bias, clamp=search.clamp, ln_k=search.ln_k)
        mixed = MixedClassifier(
            self.std, self.rob, transform, chosen.alpha, one_minus_alpha=chosen.one_minus_alpha,
            surrogate_alpha=search.surrogate_alpha, rd=task.rd,
        )  # fmt: skip
        return mixed.eval().to(self.device)

    def _logits(self, model: Any, x: Tensor) -> Tensor:
        return judged_logits(Victim.of(model), x, self.spec.batch_size)


def _device() -> torch.device:
    """The accelerator that Ray assigned; an actor without one must not take what it merely sees."""
    assigned = ray.is_initialized() and bool(ray.get_gpu_ids())
    return torch.device("cuda" if assigned and torch.cuda.is_available() else "cpu")


AttackActor: Any = ray.remote(AttackWorker)

"""What a worker computes of a partition's images: the columns of its file and the counts of its receipt.

Shapes: B images of a partition, K classes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..acceleration.arithmetic import Arithmetic
from ..attacks.adaptive import AttackBudget, AttackOutcome, adaptive_autoattack, autoattack
from ..attacks.black_box_margin import black_box_margin_attack
from ..attacks.memory import largest_batch
from ..attacks.minimum_margin import MinimumMarginResult, minimum_margin_attack
from ..attacks.red_flags import raised_flags
from ..attacks.transfer import transferred_attack
from ..attacks.victim import Victim, judged_logits
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import IdentityTransform, LayerNormTransform
from ..storage.partitions import Partition, whole_of
from ..storage.records import SearchResult
from ..storage.store import Store
from ..storage.tables import FLAG, SURVIVED, read_columns
from ..uris import is_black_box
from .tasks import AttackTask, EvaluateTask, WorkerSpec

STD_ATTACKS = ("apgd-ce", "apgd-t")  # what std's robust accuracy is measured under


@dataclass
class Attacker:
    """The run's classifiers on one device, attacked as the tasks say."""

    spec: WorkerSpec
    networks: dict[str, nn.Module]  # "std", where the run has one, and "rob"
    store: Store
    arithmetic: Arithmetic = field(init=False)
    _batch_size: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.arithmetic = Arithmetic(self.spec.precision, compile=self.spec.compile)
        self._batch_size = None if self.spec.batch_size == "auto" else self.spec.batch_size

    @property
    def std(self) -> nn.Module:
        return self.networks["std"]

    @property
    def rob(self) -> nn.Module:
        return self.networks["rob"]

    def precisions(self, x: Tensor) -> str:
        """What each network's gradients are computed in."""
        found = {role: self.arithmetic.network_copy(net, x).precision for role, net in self.networks.items()}
        return ", ".join(f"{role} {precision}" for role, precision in found.items())

    def images_at_a_time(self, x: Tensor) -> int:
        """As configured, or found once with what needs the most memory: all networks under attack."""
        if self._batch_size is None:
            if "std" in self.networks:
                mixed = MixedClassifier(self.std, self.rob, IdentityTransform(), 0.5)
                victim = Victim.of_mixed(mixed, "transfer", self.arithmetic, x)
            else:
                victim = Victim.of(self.rob, self.arithmetic, x)
            self._batch_size = largest_batch(victim, x)
        return self._batch_size

    def attack(
        self, partition: Partition, x: Tensor, y: Tensor, task: AttackTask
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """MMAA on LayerNormed rob, and the plain APGD pair on std (rob's images where std has no gradients)."""
        ids = range(partition.start, partition.stop)
        found = self._minimum_margins(x, y, ids, task)
        std = self._std_attacked(x, y, ids, task, found) if "std" in self.networks else None
        return self._attack_columns(x, y, found, std)

    def _minimum_margins(self, x: Tensor, y: Tensor, ids: range, task: AttackTask) -> MinimumMarginResult:
        rob = nn.Sequential(self.rob, task.logit_map or LayerNormTransform(self.spec.ln_k))
        batch = self.images_at_a_time(x)
        if task.method == "square":
            return black_box_margin_attack(
                rob, x, y, threat=self.spec.threat, n_queries=task.n_queries, seed=self.spec.seed,
                stop_when_broken=task.stop_when_broken, sample_ids=ids, batch_size=batch,
            )  # fmt: skip
        return minimum_margin_attack(
            rob, x, y,
            threat=self.spec.threat, n_iter=task.n_iter, n_target_classes=task.n_target_classes,
            seed=self.spec.seed, stop_when_broken=task.stop_when_broken,
            border_restarts=task.border_restarts, sample_ids=ids, batch_size=batch,
            arithmetic=self.arithmetic,
        )  # fmt: skip

    def _std_attacked(
        self, x: Tensor, y: Tensor, ids: range, task: AttackTask, found: MinimumMarginResult
    ) -> AttackOutcome:
        batch = self.images_at_a_time(x)
        if is_black_box(str(self.spec.std_uri)):
            return transferred_attack(self.std, x, y, found.x_adv, batch_size=batch)
        budget = AttackBudget(task.n_iter, task.n_target_classes, batch_size=batch)
        return autoattack(
            self.std, x, y, threat=self.spec.threat, attacks=STD_ATTACKS,
            seed=self.spec.seed, sample_ids=ids, budget=budget, arithmetic=self.arithmetic,
        )  # fmt: skip

    def _attack_columns(
        self, x: Tensor, y: Tensor, found: MinimumMarginResult, std: AttackOutcome | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rob_clean, std_columns = self._logits(self.rob, x), {}
        if std is not None:
            std_columns = {
                "std_clean": self._logits(self.std, x), "std_attacked": std.logits, "std_broken": ~std.robust
            }  # fmt: skip
        columns = {
            **std_columns,
            "rob_clean": rob_clean,
            "rob_attacked": self._logits(self.rob, found.x_adv),
            "margin": found.margin,
            "log_one_minus_margin": found.log_one_minus_margin,
            "rob_broken": found.broken,
            "x_adv": found.x_adv,
        }
        summary = {
            "classifier": "rob",
            "clean_correct": int((rob_clean.argmax(dim=1) == y).sum()),
            "robust": int((~found.broken).sum()),
            "n_forward": found.n_forward + (std.n_forward if std else 0),
            "n_backward": found.n_backward + (std.n_backward if std else 0),
        }
        return columns, summary

    def evaluate(
        self, partition: Partition, x: Tensor, y: Tensor, task: EvaluateTask
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The adaptive AutoAttack on the mixture that the search chose; plain AutoAttack where there is rob alone."""
        ids = range(partition.start, partition.stop)
        budget = replace(task.budget, batch_size=self.images_at_a_time(x))
        if task.search is None:
            outcome = autoattack(
                self.rob, x, y, threat=self.spec.threat, attacks=task.attacks, seed=self.spec.seed,
                sample_ids=ids, budget=budget, arithmetic=self.arithmetic,
            )  # fmt: skip
            return self._outcome_columns("rob", self.rob, Victim.of(self.rob), x, y, outcome)
        mixed, whole = self.mixed(task, task.search).to(x.device), whole_of(partition)
        cached = read_columns(self.store, "attack", [whole], task.attack_fingerprint, ["x_adv"])["x_adv"]
        cached = cached[partition.start - whole.start : partition.stop - whole.start]
        outcome = adaptive_autoattack(
            mixed, x, y, threat=self.spec.threat, attacks=task.attacks, mode=task.mode, seed=self.spec.seed,
            cached_BCHW=cached.to(x.device), sample_ids=ids, budget=budget, arithmetic=self.arithmetic,
        )  # fmt: skip
        return self._outcome_columns("mixed", mixed, Victim.of_mixed(mixed, task.mode), x, y, outcome)

    def _outcome_columns(
        self, name: str, model: nn.Module, victim: Victim, x: Tensor, y: Tensor, outcome: AttackOutcome
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        clean = self._logits(model, x)
        flags = raised_flags(victim, x, y, outcome.unconfirmed, batch_size=self.images_at_a_time(x))
        columns = {
            f"{name}_clean": clean,
            f"{name}_attacked": outcome.logits,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            **{f"{FLAG}{flag}": raised for flag, raised in flags.items()},
            "x_adv": outcome.x_adv,
        }
        summary = {
            "classifier": name,
            "clean_correct": int((clean.argmax(dim=1) == y).sum()),
            "robust": int(outcome.robust.sum()),
            "n_forward": outcome.n_forward,
            "n_backward": outcome.n_backward,
        }
        return columns, summary

    def mixed(self, task: EvaluateTask, search: SearchResult) -> MixedClassifier:
        """The mixture under attack."""
        mixture = task.mixture or search.deployed().mixture()
        mixed = MixedClassifier(
            self.std, self.rob, mixture.transform, mixture.alpha, one_minus_alpha=mixture.one_minus_alpha,
            temperature=mixture.temperature, surrogate_alpha=search.surrogate_alpha, rd=task.rd,
        )  # fmt: skip
        return mixed.eval()

    def _logits(self, model: Any, x: Tensor) -> Tensor:
        return judged_logits(Victim.of(model), x, self.images_at_a_time(x))

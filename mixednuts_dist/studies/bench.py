"""What studies work on: a run whose attack and search are done, and the rows of variants of it.

A variant asks a stage's task with other settings of the same partitions. Its rows lie in `studies/rows/<fingerprint>/`
of the run, written by the same pool: distributed, resumable, computed once for all studies that need them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..config import EvaluateConfig, RunConfig, digest
from ..distributed.cluster import RaySession
from ..distributed.tasks import Task
from ..errors import ConfigError
from ..mixing.mixture import Mixture
from ..mixing.transforms import LogitMap
from ..reports.report import collect
from ..reports.results import RunResults
from ..stages import attack as attack_stage
from ..stages import evaluate as evaluate_stage
from ..stages import search as search_stage
from ..stages.partitioned import Progress, Silent, run_partitions
from ..stages.runs import Run, open_run
from ..storage.records import AttackRecords, Receipt, SearchResult
from ..storage.tables import read_attack_records, read_evaluate_records

REDUCED_IMAGES = 150
REDUCED_ITERATIONS = 50
REDUCED_QUERIES = 500
DEMO_OTHER_ROB = "demo:rob_light"  # what demo:rob is compared with by default


@dataclass(frozen=True)
class Measured:
    """A variant under attack, one bool an image."""

    clean_N: Tensor
    robust_N: Tensor
    survived: dict[str, Tensor]  # attack -> still right after it and all before it


class Bench:
    """One configuration on one Ray session; everything is computed when it is first asked for.

    Args:
        full: the configured budgets on all images, instead of the reduced ones.
        robs: URIs of other robust classifiers for the studies that compare them.

    Raises:
        ConfigError: for a configuration without std.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        session: RaySession | None = None,
        progress: Progress | None = None,
        full: bool = False,
        robs: Sequence[str] = (),
    ) -> None:
        if config.std is None:
            raise ConfigError("studies need std beside rob, and this configuration has std: null; name a classifier")
        self.config, self.session, self.progress = config, session, progress or Silent()
        self.full = full
        self.other_robs = tuple(robs) or ((DEMO_OTHER_ROB,) if config.rob == "demo:rob" else ())

    @cached_property
    def run(self) -> Run:
        """The run itself, with its attack and search stages complete."""
        opened = open_run(self.config)
        attack_stage.complete(opened, self.session, self.progress)
        search_stage.complete(opened, self.session, self.progress)
        return opened

    @cached_property
    def rows(self) -> AttackRecords:
        """The attack stage's rows of all images."""
        return read_attack_records(self.run.store, self.run.partitions, self.run.attack_fingerprint)

    @cached_property
    def search(self) -> SearchResult:
        """What the run's own search selected."""
        return search_stage.read_search_result(self.run)

    @cached_property
    def results(self) -> RunResults:
        """The run's own results, with its evaluate stage complete."""
        evaluate_stage.complete(self.run, self.session, self.progress)
        return collect(self.run)

    @property
    def robs(self) -> tuple[str, ...]:
        """The run's own robust classifier first, then the others."""
        return tuple(dict.fromkeys((self.config.rob, *self.other_robs)))

    @property
    def beta(self) -> float:
        """The run's deployed beta."""
        return self.search.deployed_beta

    @property
    def n_images(self) -> int:
        """How many images, from the first on, variants are attacked on."""
        return self._part(self.run).inputs.n_images

    @property
    def reduction(self) -> tuple[str, ...]:
        """What is less than the configuration says, as remarks; nothing with `full`."""
        if self.full:
            return ()
        attacks = f"{' + '.join(self.budget.attacks)} with {self.budget.n_iter} iterations"
        return (f"Reduced: {attacks}{self._part_text()}; --full takes the configured attacks and all images.",)

    @property
    def mmaa_reduction(self) -> tuple[str, ...]:
        """The same for studies that run the minimum-margin attack again."""
        return (f"Reduced: attacked{self._part_text()}; --full takes all.",) if self._part_text() else ()

    def first(self, records: AttackRecords) -> AttackRecords:
        """The rows of the images that variants are attacked on."""
        return subset(records, torch.arange(len(records.labels_N)) < self.n_images)

    def deployed(self) -> Mixture:
        """The mixture that the search chose."""
        return self.search.deployed().mixture()

    def measured(self, label: str, mixture: Mixture | None = None, **changes: Any) -> Measured:
        """A mixture (by default the deployed one) under the adaptive attack, with some keys of `evaluate` changed."""
        evaluate = self.budget.with_changes(**changes)
        part = self._part(self.run)
        part = replace(part, config=part.config.with_changes(evaluate=evaluate))
        task = evaluate_stage.evaluate_task(part, self.search)
        used = mixture or self.deployed()
        key = digest({"evaluate": task.fingerprint, "mixture": used.settings()})
        task = replace(task, mixture=used, fingerprint=key, stage=f"studies/rows/{key}")
        self._complete(part, task, label)
        steps = [evaluate_stage.CACHED, *evaluate.attacks]
        records = read_evaluate_records(part.store, part.partitions, key, steps, stage=task.stage)
        clean_N = records.mixed_clean_NK.argmax(dim=1) == records.labels_N
        return Measured(clean_N, records.robust_N, records.survived)

    def attacked(self, label: str, logit_map: LogitMap | None = None, **changes: Any) -> AttackRecords:
        """Rob under MMAA behind another map than LayerNorm, or with some keys of `attack` changed."""
        attack = self.config.attack.with_changes(**changes)
        part = self._part(self.run)
        task = attack_stage.attack_task(replace(part, config=part.config.with_changes(attack=attack)))
        about = {} if logit_map is None else {"map": type(logit_map).__name__, **logit_map.settings()}
        key = digest({"attack": part.attack_fingerprint, "changed": attack.model_dump(mode="json"), **about})
        task = replace(task, logit_map=logit_map, fingerprint=key, stage=f"studies/rows/{key}")
        self._complete(part, task, label)
        return read_attack_records(part.store, part.partitions, key, stage=task.stage)

    def other_rows(self, rob: str) -> AttackRecords:
        """The same for another robust classifier: the attack stage of a run of its own."""
        if rob == self.config.rob:
            return self.first(self.rows)
        part = self._part(open_run(self.config.with_changes(rob=rob)))
        attack_stage.complete(part, self.session, _Labelled(self.progress, f"MMAA on {rob}"))
        return read_attack_records(part.store, part.partitions, part.attack_fingerprint)

    @property
    def budget(self) -> EvaluateConfig:
        """How variants are attacked: as configured, or cheaper."""
        configured = self.config.evaluate
        if self.full:
            return configured
        white_box = tuple(attack for attack in configured.attacks if attack.startswith("apgd"))
        changes = {
            "attacks": white_box or configured.attacks,
            "n_iter": min(configured.n_iter, REDUCED_ITERATIONS),
            "n_queries": min(configured.n_queries, REDUCED_QUERIES),
        }
        return configured.with_changes(**changes)

    def _part_text(self) -> str:
        n_all = self.run.inputs.n_images
        return f" on the first {self.n_images} of {n_all} images" if self.n_images < n_all else ""

    def _part(self, opened: Run) -> Run:
        """The run cut to the first images, in whole partitions; its rows stay valid rows of the whole."""
        if self.full:
            return opened
        n_images = max(REDUCED_IMAGES, 2 * self.config.partition_size)
        whole = -(-n_images // self.config.partition_size) * self.config.partition_size
        return replace(opened, inputs=replace(opened.inputs, n_images=min(whole, opened.inputs.n_images)))

    def _complete(self, part: Run, task: Task, label: str) -> None:
        run_partitions(part, task, self.session, _Labelled(self.progress, label))


def subset(records: AttackRecords, mask_N: Tensor) -> AttackRecords:
    """The rows where the mask is True."""
    return AttackRecords(**{name: values[mask_N] for name, values in vars(records).items()})


@dataclass(frozen=True)
class _Labelled:
    """Progress of a variant under a name that says what it is."""

    inner: Progress
    label: str

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:  # noqa: ARG002
        self.inner.stage_started(self.label, n_images, done)

    def partition_done(self, receipt: Receipt) -> None:
        self.inner.partition_done(Receipt(**{**asdict(receipt), "stage": self.label}))

    def stage_finished(self, stage: str, message: str) -> None:  # noqa: ARG002
        self.inner.stage_finished(self.label, message)

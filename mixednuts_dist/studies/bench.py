"""The data for studies: a run after its attack and search stages, the rows of its variants, and Algorithm 1 on rows.

A variant is a stage's task with other settings on the same partitions. The workers write its rows to
`studies/rows/<content hash>/` in the folder of the run, so variants are distributed, resumable and shared by studies.

Shapes: N images, K classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..config.keys import EvaluateConfig
from ..config.register import CRITERIA
from ..config.run_config import RunConfig, digest
from ..distributed.executor import Executor
from ..errors import ConfigError
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.mixture import Mixture, robust_lower_bound, tempered_log_probs
from ..mixing.transforms import LogitMap
from ..reports.counts import Count, count
from ..reports.report import collect
from ..reports.results import RunResults
from ..selection.choice import Choice
from ..selection.grid import Grid, kept_images
from ..selection.inputs import CachedLogits
from ..selection.selection import Selection, search_grid
from ..stages import search as search_stage
from ..stages.attack import Attack
from ..stages.evaluate import steps_of
from ..stages.partitioned import run_partitions
from ..stages.progress import RunProgress
from ..stages.runs import MOST_LOGITS, Run, open_run
from ..stages.search_result import read_search_result
from ..stages.stage import stage_of
from ..storage.records import AttackRecords, SearchResult
from ..storage.store import Store
from ..storage.tables import read_attack_records, read_evaluate_records

REDUCED_IMAGES = 150
REDUCED_ITERATIONS = 50
REDUCED_QUERIES = 500
DEMO_OTHER_ROB = "demo:rob_light"  # what demo:rob is compared with by default


@dataclass(frozen=True)
class Measured:
    """A variant under attack, with one bool per image."""

    clean_N: Tensor
    robust_N: Tensor
    survived: dict[str, Tensor]  # attack -> still right after it and all before it

    def cells(self) -> dict[str, Count]:
        """Return the counts as cells `clean` and `robust` of a row."""
        return {"clean": count(self.clean_N), "robust": count(self.robust_N)}


class Bench:
    """One configuration and one executor; each property is computed when it is first read.

    Args:
        full: the configured budgets on all images, instead of the reduced ones.
        robs: URIs of other robust classifiers for the studies that compare them.

    Raises:
        ConfigError: if the configuration has no `std`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        executor: Executor | None = None,
        progress: RunProgress | None = None,
        full: bool = False,
        robs: Sequence[str] = (),
    ) -> None:
        if config.std is None:
            raise ConfigError(
                "studies need both base classifiers, and this configuration has std: null. Name a classifier"
            )
        self.config, self.executor, self.progress = config, executor, progress or RunProgress()
        self.full = full
        self.other_robs = tuple(robs) or ((DEMO_OTHER_ROB,) if config.rob == "demo:rob" else ())

    @cached_property
    def store(self) -> Store:
        """Return the run's folder without running a stage."""
        return open_run(self.config).store

    @cached_property
    def run(self) -> Run:
        """Return the run, with its attack and search stages complete."""
        opened = open_run(self.config)
        stage_of(self.config, "attack").complete(opened, self.executor, self.progress)
        search_stage.complete(opened, self.executor, self.progress)
        return opened

    @cached_property
    def rows(self) -> AttackRecords:
        """Return the attack rows of the images that the search reads: all images, or a sample of very many."""
        run = self.run
        return read_attack_records(run.rows, run.partitions, run.attack_content_hash, sample_ids=run.sample_ids)

    @cached_property
    def first_rows(self) -> AttackRecords:
        """Return the attack rows of the images on which variants are attacked."""
        return self.other_rows(self.config.rob)

    @property
    def sampling(self) -> tuple[str, ...]:
        """Return a remark if the search read only some of the images."""
        if "rows" not in vars(self):  # no study has read them
            return ()
        n_read, n_all = len(self.rows.labels_N), self.run.inputs.n_images
        if n_read == n_all:
            return ()
        how = "" if self.config.search.first else ", drawn at random"
        return (f'"All images" are the {n_read:,} of {n_all:,} that the search read{how}.',)

    @cached_property
    def search(self) -> SearchResult:
        """Return the outcome of the search."""
        return read_search_result(self.run)

    @cached_property
    def results(self) -> RunResults:
        """Return the results of the run, with its evaluate stage complete."""
        stage_of(self.config, "evaluate").complete(self.run, self.executor, self.progress)
        return collect(self.run)

    @property
    def robs(self) -> tuple[str, ...]:
        """Return the robust classifier of the run, then the others."""
        return tuple(dict.fromkeys((self.config.rob, *self.other_robs)))

    @property
    def beta(self) -> float:
        """Return the deployed beta."""
        return self.search.deployed_beta

    def grid(self, *betas: float) -> Grid:
        """Return the grid of the run, by default for the deployed beta."""
        return Grid.configured(self.config.search, betas or (self.beta,))

    @property
    def n_images(self) -> int:
        """Return the number of images on which variants are attacked, from the first on."""
        return self._part(self.run).n_images

    @property
    def reduction(self) -> tuple[str, ...]:
        """Return remarks on budgets that are smaller than configured; none with `full`."""
        if self.full:
            return (f"Attacked{self._part_text()}: more rows do not fit in memory.",) if self._part_text() else ()
        attacks = f"{' + '.join(self.budget.attacks)} with {self.budget.n_iter} iterations"
        return (f"Reduced: {attacks}{self._part_text()}; --full takes the configured attacks and all images.",)

    @property
    def mmaa_reduction(self) -> tuple[str, ...]:
        """Return the same remarks for studies that run MMAA again."""
        reduced = f"Reduced: attacked{self._part_text()}; --full takes all."
        return self.reduction if self.full else (reduced,) * bool(self._part_text())

    def deployed(self) -> Mixture:
        """Return the deployed mixed classifier."""
        return self.search.deployed().mixture()

    def measured(self, label: str, mixture: Mixture | None = None, **changes: Any) -> Measured:
        """Attack a mixed classifier (by default the deployed one) adaptively, with some keys of `evaluate` changed."""
        evaluate = self.budget.with_changes(**changes)
        part = replace(self._part(self.run), config=self.config.with_changes(evaluate=evaluate))
        task = stage_of(part.config, "evaluate").task(part)
        mixture = mixture or self.deployed()
        key = digest({"evaluate": task.content_hash, "mixture": mixture.settings()})
        mixture = replace(mixture, surrogate_alpha=self.search.surrogate_alpha, rd=evaluate.rd)
        task = replace(task, mixture=mixture, content_hash=key, stage=f"studies/rows/{key}")
        run_partitions(part, task, self.executor, self.progress, label=label)
        records = read_evaluate_records(part.rows, part.partitions, key, steps_of(part), stage=task.stage)
        return Measured(records.clean_N, records.robust_N, records.survived)

    def attacked(
        self, label: str, logit_map: LogitMap | None = None, *, rob: str | None = None, **changes: Any
    ) -> AttackRecords:
        """Attack `rob` or another classifier by MMAA, with some keys of `attack` changed.

        Args:
            label: the name of the attack in the progress display.
            logit_map: the map after which margins are minimized; by default LayerNorm.
            rob: the URI of another classifier, whose logits the columns of `rob` then hold.
            changes: keys of `attack` and their values.
        """
        attack = self.config.attack.with_changes(**changes)
        part = self._part(self.run if rob in (None, self.config.rob) else open_run(self.config.with_changes(rob=rob)))
        stage = Attack("attack", attack)
        stage.logit_map = logit_map
        task = stage.task(part)
        if changes or logit_map is not None:
            about = {} if logit_map is None else {"map": type(logit_map).__name__, **logit_map.settings()}
            key = digest({"attack": part.attack_content_hash, "changed": attack.model_dump(mode="json"), **about})
            task = replace(task, content_hash=key, stage=f"studies/rows/{key}")
        run_partitions(part, task, self.executor, self.progress, label=label)
        return read_attack_records(part.rows, part.partitions, task.content_hash, stage=task.stage)

    def other_rows(self, rob: str) -> AttackRecords:
        """Return the attack rows of another robust classifier, from a separate run."""
        return self.attacked(f"MMAA on {rob}", rob=rob)

    @property
    def budget(self) -> EvaluateConfig:
        """Return the budget for variants: as configured with `full`, and smaller otherwise."""
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
        """Return the run cut to the first images, in whole partitions, whose rows stay valid for the whole run.

        With `full`, the number of images is limited only by the memory that the search may use.
        """
        size, inputs = opened.partition_size, opened.inputs
        most = max(1, MOST_LOGITS // (inputs.n_classes * size)) * size
        most = min(most, opened.searched.n_images)
        wanted = inputs.n_images if self.full else -(-REDUCED_IMAGES // size) * size
        return replace(opened, first=min(wanted, most, inputs.n_images))


def subset(records: AttackRecords, mask_N: Tensor) -> AttackRecords:
    """Return the rows at which the mask is True."""
    return AttackRecords(**{name: values[mask_N] for name, values in vars(records).items()})


# --- Algorithm 1 on rows ---------------------------------------------------------------------------------------------


def select(rows: AttackRecords, grid: Grid, criterion: str) -> Selection:
    """Run Algorithm 1 on these rows in this process.

    Raises:
        InvalidInputError: if `rob` is robust on none of the images, or if no candidate can be used.
    """
    cached = CachedLogits(
        rows.rob_clean_NK, rows.rob_attacked_NK, rows.labels_N, std_pred_B=rows.std_clean_NK.argmax(dim=1)
    )
    return search_grid(CRITERIA.get(criterion).from_rows(cached, clamp=grid.clamp, ln_k=grid.ln_k), grid)


def only(grid: Grid, choice: Choice) -> Grid:
    """Return the grid with a single candidate, so that only alpha is searched."""
    return replace(grid, scales=(choice.scale,), powers=(choice.power,), biases=(choice.bias,))


def weighted(rows: AttackRecords, transform: LogitMap, beta: float) -> Mixture:
    """Return a mixed classifier with any map of the logits of `rob`, and the alpha that retains a share beta.

    The margin threshold is the order statistic of Algorithm 1 on signed margins; a negative threshold is replaced by 0.
    """
    mapped_NK = transform(rows.rob_attacked_NK.double())
    right_N = mapped_NK.argmax(dim=1) == rows.labels_N
    log_gaps = log_one_minus_signed_margin(mapped_NK[right_N], rows.labels_N[right_N]).sort().values
    log_cutoff = log_gaps[kept_images(beta, len(log_gaps)) - 1] if len(log_gaps) else torch.zeros(())
    cutoff = float(-torch.expm1(log_cutoff))
    return Mixture(transform, 1 / (1 + cutoff), cutoff / (1 + cutoff))


def clean_correct(mixture: Mixture, rows: AttackRecords) -> Tensor:
    """Return the clean images that the mixed classifier has right, (N,) bool, exactly and at any temperature."""
    return mixture.classes(rows.std_clean_NK, rows.rob_clean_NK) == rows.labels_N


def robust_bound(mixture: Mixture, rows: AttackRecords) -> Tensor:
    """Return the images that are right under the stored adversarial examples for any class of `std`, (N,) bool."""
    return robust_lower_bound(rows.rob_attacked_NK, rows.labels_N, mixture)


def at_clean_accuracy(rows: AttackRecords, mixture: Mixture, n_correct: int) -> Mixture:
    """Return the mixed classifier with the largest alpha that has `n_correct` of these clean images right.

    The function tries 400 values of 1 - alpha from 1e-6 to 1/2. If none has enough images right, it returns the best.
    """
    std_NK = tempered_log_probs(rows.std_clean_NK.double(), mixture.temperature)
    rob_NK = mixture.transform(rows.rob_clean_NK.double()).log_softmax(dim=1)
    weights = torch.logspace(-6, math.log10(0.5), 400, dtype=torch.float64).tolist()
    counts = []
    for weight in weights:
        mixed_NK = torch.logaddexp(std_NK + math.log(weight), rob_NK + math.log1p(-weight))
        counts.append(int((mixed_NK.argmax(dim=1) == rows.labels_N).sum()))
    reached = min(n_correct, max(counts))
    best = next(weight for weight, count in zip(weights, counts, strict=True) if count >= reached)
    return replace(mixture, alpha=1 - best, one_minus_alpha=best)

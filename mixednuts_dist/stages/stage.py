"""The interface of a stage: a file that defines what a worker computes for each image, and how the commands show it.

To add a stage, register a subclass of `Stage` in a separate file, either in this folder or anywhere else (then name the
file in the configuration: `extensions: [my_stage.py]`). docs/architecture.md has an example in fifteen lines. A stage
defines

- `Keys`: its section of the configuration, under the stage's name; a run has the stage only if that key is given;
- `needs` and `of_mixture`: the stages that have to be complete before it;
- `compute(worker, partition)`: the rows of one partition;
- `passes`, for `estimate`, and `words`, for the report's table.

`mixednuts run CONFIG` then runs the stage, `--only NAME` runs it alone, and `status`, `estimate` and the report show
it. The rows of a partition are one Parquet file in `<storage>/<name>/<stage>/<hash>/`, and partitions that are written
are skipped. A stage's keys are part of this hash and not of the run id, so a stage can be added to a finished run.

This module and the modules of the built-in stages import PyTorch only on workers, because `status` does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..attacks.budget import AttackBudget
from ..config.keys import AttackConfig, EvaluateConfig
from ..config.register import STAGES
from ..config.run_config import RunConfig, digest
from ..config.section import Section
from ..distributed.tasks import Columns, Counts, Task
from ..errors import InvalidInputError
from ..storage.partitions import Partition
from ..storage.records import PartitionSummary, SearchResult
from .progress import RunProgress
from .runs import Run, finished_partitions, open_run, require_complete
from .search_result import deployed_settings, read_search_result

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench
    from .run_inputs import Inputs


class Stage:
    """One stage of a run. The driver sends it to the workers with its task.

    Args:
        name: the name in the register `STAGES`.
        keys: the stage's section of the configuration.
    """

    Keys: ClassVar[type[Section]] = Section  # the model of the stage's section in the configuration
    needs: ClassVar[tuple[str, ...]] = ()  # stages whose rows must be complete
    of_mixture: ClassVar[bool] = False  # True: the stage works on the deployed mixed classifier, if the run has `std`

    def __init__(self, name: str, keys: Section) -> None:
        self.name, self.keys = name, keys

    def asked(self, config: RunConfig) -> bool:  # noqa: ARG002
        """Return whether the run has the stage, given that the configuration has its key."""
        return True

    def check_inputs(self, inputs: Inputs) -> None:
        """Raise an error if the keys do not fit the run's images; called before the first stage of a run begins."""

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        """Return the rows of a partition without `sample_id` and `label`, and its counts (`worker.counts`)."""
        raise NotImplementedError(f"stage {self.name!r} does not define what it computes")

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:  # noqa: ARG002
        """Return, for `estimate`, the forward and backward passes of the most expensive image, by classifier."""
        return {}

    def costs(self, opened: Run) -> Mapping[Partition, float] | None:  # noqa: ARG002
        """Return the expected cost per partition in any unit, or None for the number of images."""
        return None

    def words(self) -> str:
        """Return a short text for the report on what a robust image withstands."""
        return STAGES.entries()[self.name].describes

    def outcomes(self, opened: Run) -> Mapping[str, tuple[Tensor, Tensor]]:  # noqa: ARG002
        """Return the stage's rows of the accuracy table, name -> clean and robust images, (N,) bool.

        If empty, the report shows one row from the summaries.
        """
        return {}

    def certified(self, opened: Run) -> Certified | None:  # noqa: ARG002
        """Return the certified images of `rob` and of the mixed classifier of each beta, for the report."""
        return None

    def tables(self, opened: Run) -> Mapping[str, tuple[Sequence[str], Sequence[Sequence[object]]]]:  # noqa: ARG002
        """Return tables for the report, title -> columns and rows; images (N,) bool in a row are a count."""
        return {}

    def model_name(self, config: RunConfig) -> str:
        """Return the classifier that the stage works on, "mixed" or "rob"."""
        return "mixed" if self.of_mixture and config.std is not None else "rob"

    def content_hash(self, opened: Run) -> str:
        """Return 8 hex digits of everything that determines the rows: inputs, keys and results of earlier stages.

        Raises:
            MissingArtifact: if the stage works on the mixed classifier and the search has not run.
        """
        keys = ("version", "data", "std", "rob", "threat", "seed", "partition_size", "precision", "extensions")
        values = opened.config.determinants()
        search = self.searched(opened)
        return digest(
            {
                "run": {key: values[key] for key in keys if key in values},
                "checksums": opened.inputs.checksums,
                "keys": self.keys.model_dump(mode="json"),
                "needs": [stage_of(opened.config, name).content_hash(opened) for name in self.needs],
                **({"deployed": deployed_settings(search)} if search else {}),
            }
        )

    def rows(self, opened: Run, columns: Sequence[str]) -> dict[str, Tensor]:
        """Return columns of all images, in their order.

        Raises:
            MissingArtifact: if the stage has not finished.
        """
        return opened.columns(self.name, self.content_hash(opened), columns)

    def searched(self, opened: Run) -> SearchResult | None:
        """Return the search result that the stage works on, if any; errors as in `read_search_result`."""
        return read_search_result(opened) if self.model_name(opened.config) == "mixed" else None

    def part(self, opened: Run) -> Run:
        """Return the run cut to the partitions that the stage computes."""
        return opened

    def finished(self, opened: Run) -> dict[Partition, PartitionSummary]:
        """Return the summaries of the finished partitions among those that the stage computes."""
        return finished_partitions(self.part(opened), self.name, self.content_hash(opened))

    def task(self, opened: Run) -> Task:
        """Return the task for the workers, which contains the stage itself with its attributes."""
        search = self.searched(opened)
        mixture = replace(search.deployed().mixture(), rd=opened.config.evaluate.rd) if search else None
        n_passes = sum(forward + 2 * backward for forward, backward in self.passes(opened).values())
        return StageTask(
            stage=self.name, content_hash=self.content_hash(opened), mixture=mixture, of=self,
            n_passes=n_passes or Task.n_passes,
        )  # fmt: skip

    def complete(self, opened: Run, executor: Executor | None, progress: RunProgress) -> None:
        """Compute the unfinished partitions.

        Raises:
            MissingArtifact: if an earlier stage has not finished.
            PartitionFailed: if partitions fail repeatedly; all others are finished first.
        """
        from .partitioned import run_partitions

        self.require_needs(opened)
        run_partitions(self.part(opened), self.task(opened), executor, progress, self.costs(opened))

    def require_needs(self, opened: Run) -> None:
        """Check that the stages that this stage needs are complete, as far as the run has them.

        Raises:
            MissingArtifact: with the missing partitions and the command that computes them.
        """
        for other in (stage_of(opened.config, name) for name in self.needs):
            if other.asked(opened.config):
                require_complete(other.part(opened), other.name, other.content_hash(opened))

    def run(self, config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
        """Open the run and complete the stage; errors as in `complete` and `open_run`."""
        opened = open_run(config)
        self.check_inputs(opened.inputs)
        self.complete(opened, executor, progress or RunProgress())
        return opened


@dataclass(frozen=True)
class Certified:
    """The numbers of images, out of `total`, that are certified in L2."""

    claim: str  # "certified in L2 ...", then what a certificate guarantees and with which confidence
    radii: Sequence[float]  # as configured, in ascending order
    by_beta: Mapping[float, Sequence[int]]  # beta -> number of images at each of `radii`
    by_radius: Mapping[str, Sequence[tuple[float, int]]]  # "rob" and "mixed" -> (radius, number of images)
    reach: Sequence[float]  # by sample id, the largest certified radius of the deployed classifier; 0 for none
    total: int


@dataclass(frozen=True, kw_only=True)
class StageTask(Task):
    """The task of a stage, which calls the stage's `compute`."""

    of: Stage

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        return self.of.compute(worker, partition)


def classifier_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the classifiers of a run."""
    return ("rob",) if config.std is None else ("std", "rob", "mixed")


def stages_of(config: RunConfig) -> list[Stage]:
    """Return the stages of a configuration, in the order of the register."""
    found = [stage_of(config, name) for name in STAGES.names() if config.section(name) is not None]
    return [stage for stage in found if stage.asked(config)]


def stage_of(config: RunConfig, name: str) -> Stage:
    """Return a stage of a configuration.

    Raises:
        InvalidInputError: if the configuration has no key of that name.
    """
    kind, keys = STAGES.get(name), config.section(name)
    if keys is None:
        raise InvalidInputError(f"{config.name} does not request the stage {name!r}. Give it the key `{name}: {{}}`")
    stage: Stage = kind(name, keys)
    return stage


def budget_of(section: AttackConfig | EvaluateConfig, norm: str = "") -> AttackBudget:
    """Return the attack budget of a section of the configuration; the budget of a version depends on the norm."""
    common = {key: getattr(section, key) for key in ("n_iter", "n_target_classes", "n_queries")}
    if isinstance(section, EvaluateConfig):
        return AttackBudget(**common, joint_starts=section.joint_starts).in_version(section.version, norm)
    return AttackBudget(**common, border_restarts=section.border_restarts)


def attack_passes(attacks: Sequence[str], budget: AttackBudget, n_classes: int) -> tuple[int, int]:
    """Return the (forward, backward) passes of an image that survives all attacks.

    Three forward passes are added: the clean image, its stored adversarial example, and the last verification.
    """
    from ..attacks.plans import passes_of

    each = [passes_of(attack, budget, n_classes) for attack in attacks]
    return sum(forward for forward, _ in each) + 3, sum(backward for _, backward in each)

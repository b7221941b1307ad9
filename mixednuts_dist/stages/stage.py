"""The interface of a stage: a file that defines what a worker computes for each image, and how the commands show it.

To add a stage, register a subclass of `Stage` in a separate file, either in this folder or anywhere else (then name the
file in the configuration: `extensions: [my_stage.py]`). docs/architecture.md has an example in fifteen lines. A stage
defines

- `Keys`: its section of the configuration, under the stage's name; a run has the stage only if that key is given;
- `needs` and `of_mixture`: the stages that have to be complete before it;
- `compute(worker, piece)`: the rows of one partition, and `columns`, the names of these rows' columns;
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
from ..config.attack_config import AttackConfig, EvaluateConfig
from ..config.register import ATTACKS, STAGES
from ..config.run_config import RunConfig, digest
from ..config.section import Section
from ..distributed.tasks import Columns, Summary, Task
from ..errors import InvalidInputError
from ..storage.partitions import Partition
from ..storage.records import SearchResult
from ..storage.tables import read_columns
from .progress import RunProgress
from .runs import Run, open_run, read_search_result, require_complete

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench
    from ..mixing.mixture import Mixture
    from ..selection.inputs import Certificates


class Stage:
    """One stage of a run, under the name that it is registered by. It travels to the workers with its task.

    Args:
        keys: its section of the configuration.
    """

    Keys: ClassVar[type[Section]] = Section  # of its section in the configuration
    needs: ClassVar[tuple[str, ...]] = ()  # stages whose rows must be complete
    of_mixture: ClassVar[bool] = False  # about the searched mixture (in a run without std: about rob), not rob
    columns: ClassVar[Mapping[str, str]] = {}  # what `compute` returns: name -> meaning, with unit; () for unchecked

    def __init__(self, name: str, keys: Section) -> None:
        self.name, self.keys = name, keys

    def asked(self, config: RunConfig) -> bool:  # noqa: ARG002
        """Whether the run has the stage, given that its key is there."""
        return True

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        """The rows of a piece, beside `sample_id` and `label`, and the counts of its receipt (`worker.summary`)."""
        raise NotImplementedError(f"stage {self.name!r} does not define what it computes")

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:  # noqa: ARG002
        """For `estimate`: forward and backward passes of the costliest image, by classifier (std, rob, mixed)."""
        return {}

    def likely_share(self, opened: Run) -> tuple[float, str] | None:  # noqa: ARG002
        """For `estimate`, before any row is there: which part of the passes is likely, and why; None for unknown."""
        return None

    def costs(self, opened: Run) -> Mapping[Partition, float] | None:  # noqa: ARG002
        """What partitions are likely to cost, in any unit: the heaviest go first. None for their number of images."""
        return None

    def further(self) -> Mapping[str, str]:
        """What other run goes on from the rows: why -> KEY.PATH=VALUE, which the command prints as its next one."""
        return {}

    def words(self) -> str:
        """For the report's table: what an image that counts as robust has withstood."""
        return STAGES.entries()[self.name].describes

    def outcomes(self, opened: Run) -> Sequence[Outcome]:  # noqa: ARG002
        """The stage's rows of the report's accuracy table once it is complete; none for one row of the receipts."""
        return ()

    def certificates(self, opened: Run, sample_ids: Sequence[int] | None) -> Certificates:  # noqa: ARG002
        """For a criterion that says `stage=` of this one: what its complete rows prove of these images, or of all."""
        raise InvalidInputError(f"stage {self.name!r} certifies nothing that a search could count")

    def certified(self, opened: Run) -> Certified | None:  # noqa: ARG002
        """What is proven of rob and of every beta's mixture, for the report's chart and its images."""
        return None

    def tables(self, opened: Run) -> Mapping[str, tuple[Sequence[str], Sequence[Sequence[object]]]]:  # noqa: ARG002
        """Tables of its own for the report: title -> columns and rows; a pair (some, all) in a row is a count."""
        return {}

    def model_name(self, config: RunConfig) -> str:
        """Which classifier the stage is about."""
        return "mixed" if self.of_mixture and config.std is not None else "rob"

    def fingerprint(self, opened: Run) -> str:
        """8 hex digits of all that the rows depend on: inputs, keys, earlier stages and the mixture.

        Raises:
            MissingArtifact: where the stage is about the mixture and the search has not been run.
        """
        keys = ("version", "data", "std", "rob", "threat", "seed", "partition_size", "precision", "extensions")
        values = opened.config.determinants()
        search = self.searched(opened)
        return digest(
            {
                "run": {key: values[key] for key in keys if key in values},
                "checksums": opened.inputs.checksums,
                "keys": self.keys.model_dump(mode="json"),
                "needs": [stage_of(opened.config, name).fingerprint(opened) for name in self.needs],
                **({"deployed": deployed_settings(search)} if search else {}),
            }
        )

    def rows(self, opened: Run, columns: Sequence[str]) -> dict[str, Tensor]:
        """Columns of all images, in their order.

        Raises:
            MissingArtifact: where the stage has not finished.
        """
        fingerprint = self.fingerprint(opened)
        require_complete(opened, self.name, fingerprint)
        return read_columns(opened.rows, self.name, opened.partitions, fingerprint, columns)

    def searched(self, opened: Run) -> SearchResult | None:
        """What the search chose, where the stage is about the mixture. Errors as in `read_search_result`."""
        return read_search_result(opened) if self.model_name(opened.config) == "mixed" else None

    def part(self, opened: Run) -> Run:
        """The run cut to the partitions that the stage computes: all of them, or those of `search.first`."""
        return opened

    def task(self, opened: Run) -> Task:
        """What goes to the workers; a stage with more to say than its keys returns a task of its own."""
        search = self.searched(opened)
        mixture = deployed_mixture(opened, search) if search else None
        return _StageTask(stage=self.name, fingerprint=self.fingerprint(opened), mixture=mixture, of=self)

    def complete(self, opened: Run, executor: Executor | None, progress: RunProgress) -> None:
        """Compute the partitions that are not done.

        Raises:
            MissingArtifact: where an earlier stage has not finished.
            PartitionFailed: where partitions failed all of their tries; the others are finished first.
        """
        from .partitioned import run_partitions

        require_needs(self, opened)
        run_partitions(self.part(opened), self.task(opened), executor, progress, self.costs(opened))

    def run(self, config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
        """`complete` on a run that is opened for it; errors as there and in `open_run`."""
        opened = open_run(config)
        self.complete(opened, executor, progress or RunProgress())
        return opened


@dataclass(frozen=True)
class Outcome:
    """A row of the report's accuracy table, of `total` images."""

    name: str
    clean: int
    robust: int
    total: int


@dataclass(frozen=True)
class Certified:
    """Numbers of images that are certified, of `total`, and how far each image is."""

    claim: str  # what a certificate says, and how surely
    norm: str
    radii: Mapping[float, str]  # that were asked for, rising, and how each is written
    by_beta: Mapping[float, tuple[int, ...]]  # images at each of `radii`
    by_radius: Mapping[str, Sequence[tuple[float, int]]]  # of rob alone and of the deployed mixture
    reach: Sequence[float]  # by sample id: the deployed mixture's largest certified radius, 0 for none
    total: int


@dataclass(frozen=True, kw_only=True)
class _StageTask(Task):
    of: Stage

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        columns, summary = self.of.compute(worker, piece)
        if self.of.columns and columns.keys() != self.of.columns.keys():
            raise InvalidInputError(
                f"stage {self.of.name!r} returned the columns {', '.join(columns)}; its `columns` lists "
                f"{', '.join(self.of.columns)}"
            )
        return columns, summary


def classifier_names(config: RunConfig) -> tuple[str, ...]:
    """What a run has to say something of: its two classifiers and the mixture, or rob alone."""
    return ("rob",) if config.std is None else ("std", "rob", "mixed")


def stages_of(config: RunConfig) -> list[Stage]:
    """The stages that a configuration asks for, in the order of the register."""
    found = [stage_of(config, name) for name in STAGES.names() if config.section(name) is not None]
    return [stage for stage in found if stage.asked(config)]


def stage_of(config: RunConfig, name: str) -> Stage:
    """A stage that the configuration asks for.

    Raises:
        InvalidInputError: for a stage without a key in the configuration; it names the key.
    """
    kind, keys = STAGES.get(name), config.section(name)
    if keys is None:
        raise InvalidInputError(f"{config.name} does not ask for the stage {name!r}; give it the key `{name}: {{}}`")
    stage: Stage = kind(name, keys)
    return stage


def require_needs(stage: Stage, opened: Run) -> None:
    """Refuse to begin a stage before those that it needs are complete; without std some of them are not there.

    Raises:
        MissingArtifact: naming what is missing and the command that computes it.
    """
    needed = [stage_of(opened.config, name) for name in stage.needs]
    for other in needed:
        if other.asked(opened.config):
            require_complete(other.part(opened), other.name, other.fingerprint(opened))


def deployed_mixture(opened: Run, search: SearchResult) -> Mixture:
    """What the search chose, with the surrogate that gradients against it are taken through."""
    return replace(search.deployed().mixture(), surrogate_alpha=search.surrogate_alpha, rd=opened.config.evaluate.rd)


def deployed_settings(search: SearchResult) -> dict[str, object]:
    """Plain values that are equal only for the same deployed mixture."""
    return {"alpha_d": search.surrogate_alpha, **search.deployed().settings()}


def budget_of(section: AttackConfig | EvaluateConfig, norm: str = "") -> AttackBudget:
    """The passes that a section of the configuration allows an image; those of a version depend on the norm."""
    common = {key: getattr(section, key) for key in ("n_iter", "n_target_classes", "n_queries")}
    if isinstance(section, EvaluateConfig):
        return AttackBudget(**common, joint_starts=section.joint_starts).in_version(section.version, norm)
    return AttackBudget(**common, border_restarts=section.border_restarts)


def attack_passes(attacks: Sequence[str], budget: AttackBudget, n_classes: int) -> tuple[int, int]:
    """(forward, backward) of an image that survives the attacks once, as their register entries say.

    Added are the clean image's pass, that at the stored points and the last verdict's; those in between are few.
    """
    each = [ATTACKS.get(attack).passes(budget.of(attack), n_classes) for attack in attacks]
    return sum(forward for forward, _ in each) + 3, sum(backward for _, backward in each)

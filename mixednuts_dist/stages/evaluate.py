"""The evaluate stage: adaptive AutoAttack on the deployed mixed classifier, or AutoAttack on `rob` alone.

Shapes: B images of a partition, C x H x W, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..attacks.budget import WARM_START
from ..config.attack_config import EvaluateConfig
from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..distributed.tasks import Columns, Counts, Task
from ..storage.partitions import Partition
from ..storage.records import PartitionSummary
from ..storage.tables import FLAG, SURVIVED
from .progress import RunProgress
from .runs import Run, finished_partitions
from .search_result import evaluate_content_hash
from .stage import Stage, attack_passes, budget_of, run_stage
from .warm_start import StoredExamples, examples_of_round, hardest_examples

if TYPE_CHECKING:
    from torch import Tensor

    from ..attacks.scheduler import Group, Scheduler
    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench

_ROBUST_IMAGE_COSTS = 30  # relative to an image that breaks
run = partial(run_stage, "evaluate")


@STAGES("evaluate", describes="the adaptive AutoAttack on the mixed classifier", order=2)
class Evaluate(Stage):
    """Attacks the deployed mixed classifier or, in a run without `std`, the robust classifier."""

    needs = ("attack",)
    of_mixture = True
    keys: EvaluateConfig
    warm_start: tuple[StoredExamples, ...] = ()  # adversarial examples to try before any attack

    def content_hash(self, opened: Run) -> str:
        return evaluate_content_hash(opened, self.searched(opened))

    def task(self, opened: Run) -> Task:
        if self.keys.warm_start and (search := self.searched(opened)):
            sources = StoredExamples("attack", opened.attack_content_hash), *map(examples_of_round, search.rounds)
            self.warm_start = tuple(replace(source, n_images=opened.config.search.first) for source in sources)
        return super().task(opened)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        budget, draws = budget_of(self.keys, opened.config.threat.norm), self.keys.eot or 1
        forward, backward = attack_passes(self.keys.attacks, budget, opened.inputs.n_classes)
        return {self.model_name(opened.config): (forward * draws, backward * draws)}

    def likely_share(self, opened: Run) -> tuple[float, str] | None:
        attacked = list(self._attacked(opened).values())
        if not attacked:
            return None
        share = sum(summary.robust for summary in attacked) / sum(summary.n_images for summary in attacked)
        return share, f"if the mixed classifier is robust on the same images as rob, {100 * share:.0f}%"

    def costs(self, opened: Run) -> Mapping[Partition, float] | None:
        """An image that MMAA breaks mostly falls to the first attack, which is cheap."""
        return {
            part: one.robust + (one.n_images - one.robust) / _ROBUST_IMAGE_COSTS
            for part, one in self._attacked(opened).items()
        } or None

    def _attacked(self, opened: Run) -> Mapping[Partition, PartitionSummary]:
        """Return the finished partitions of the attack stage; none without `std`."""
        if opened.config.std is None:
            return {}
        return finished_partitions(opened.searched, "attack", opened.attack_content_hash)

    def run(self, config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
        from .cross_check import cross_check

        opened = super().run(config, executor=executor, progress=progress)
        cross_check(opened, executor, progress or RunProgress())
        return opened

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        from ..attacks.gradient_model import AttackedModel
        from ..attacks.red_flags import raised_flags

        x, y = worker.images(partition)
        model, name = worker.model, worker.model_name

        def warm(partition: Partition) -> Group:
            group = worker.group(partition)
            if not self.warm_start:
                return group
            examples = [x_adv for source in self.warm_start for x_adv in source.read(worker, partition)]
            return replace(group, known=hardest_examples(worker, model, group.x, group.y, examples))

        outcome = worker.attacked(partition, self.engine(worker, x, self.keys.attacks), group=warm)
        clean = worker.logits(model, x)
        attacked = AttackedModel.of(model, mode=self.keys.mode)
        flags = raised_flags(attacked, x, y, outcome.unconfirmed, batch_size=worker.shape(x))
        columns = {
            f"{name}_clean": clean,
            f"{name}_attacked": outcome.logits,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            **{f"{FLAG}{flag}": raised for flag, raised in flags.items()},
            "x_adv": outcome.x_adv,
        }
        return columns, worker.counts(name, clean, y, outcome.robust, outcome.n_forward, outcome.n_backward)

    def engine(self, worker: Workbench, x: Tensor, attacks: Sequence[str]) -> Callable[[], Scheduler]:
        """Return a function that starts an engine of these attacks on `worker.model`."""
        from ..attacks.scheduler import Scheduler

        return partial(
            Scheduler, worker.model, x, threat=worker.spec.threat, attacks=attacks, mode=self.keys.mode,
            seed=worker.spec.seed, budget=budget_of(self.keys, worker.spec.threat.norm), shape=worker.shape(x),
            copies=worker.copies, eot=self.keys.eot,
        )  # fmt: skip


def steps_of(opened: Run) -> list[str]:
    """Return the names of the steps of the evaluation, in order; each has a column of surviving images."""
    evaluate = opened.config.evaluate
    warm = evaluate.warm_start and opened.config.std is not None
    return [*([WARM_START] if warm else []), *evaluate.attacks]

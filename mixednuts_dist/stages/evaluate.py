"""The evaluate stage: adaptive AutoAttack on the deployed mixed classifier, or AutoAttack on `rob` alone.

With `evaluate.check`, the unmodified pyautoattack package then attacks the images that remain robust.

Shapes: B images of a partition, C x H x W, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..attacks.budget import WARM_START
from ..config.keys import EvaluateConfig
from ..config.register import STAGES
from ..config.run_config import RunConfig, digest
from ..distributed.tasks import Columns, Counts, Task
from ..storage.partitions import Partition
from ..storage.tables import FLAG, SURVIVED
from .progress import RunProgress
from .runs import Run, finished_partitions
from .search_result import evaluate_content_hash
from .stage import Stage, attack_passes, budget_of, stage_of
from .warm_start import StoredExamples, examples_of_round, hardest_examples

if TYPE_CHECKING:
    from ..attacks.result import AttackResult
    from ..attacks.scheduler import Group
    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench

_ROBUST_IMAGE_COSTS = 30  # relative to an image that breaks


def run(config: RunConfig, **options: Any) -> Run:
    """Open the run of a configuration and complete this stage; arguments and errors as in `Stage.run`."""
    return stage_of(config, "evaluate").run(config, **options)


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

    def costs(self, opened: Run) -> Mapping[Partition, float] | None:
        """Return the expected cost per partition. Images that MMAA broke are cheap: the first attack breaks most."""
        if opened.config.std is None:
            return None
        attacked = finished_partitions(opened.searched, "attack", opened.attack_content_hash)
        return {part: one.robust + (one.n_images - one.robust) / _ROBUST_IMAGE_COSTS for part, one in attacked.items()}

    def run(self, config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
        opened = super().run(config, executor=executor, progress=progress)
        if check := cross_check(config):
            check.complete(opened, executor, progress or RunProgress())
        return opened

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        from ..attacks.gradient_model import AttackedModel
        from .red_flags import raised_flags

        x, y = worker.images(partition)
        model, name = worker.model, worker.model_name

        def warm(partition: Partition) -> Group:
            group = worker.group(partition)
            if not self.warm_start:
                return group
            examples = [x_adv for source in self.warm_start for x_adv in source.read(worker, partition)]
            return replace(group, known=hardest_examples(worker, model, group.x, group.y, examples))

        outcome = attacked_as(self.keys, worker, partition, self.keys.attacks, group=warm)
        clean = worker.logits(model, x)
        attacked = AttackedModel.of(model, mode=self.keys.mode)
        flags = raised_flags(attacked, x, y, outcome.unconfirmed, batch_size=worker.shape(x))
        columns = {
            f"{name}_clean": clean,
            f"{name}_attacked": outcome.logits,
            "clean": outcome.clean,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            **{f"{FLAG}{flag}": raised for flag, raised in flags.items()},
            "x_adv": outcome.x_adv,
        }
        return columns, worker.counts(name, outcome.clean, y, outcome.robust, outcome.n_forward, outcome.n_backward)


def attacked_as(
    keys: EvaluateConfig, worker: Workbench, partition: Partition, attacks: Sequence[str], **options: Any
) -> AttackResult:
    """Run attacks on `worker.model` with the settings of an evaluation."""
    budget = budget_of(keys, worker.spec.threat.norm)
    return worker.attacked(partition, worker.model, attacks, budget, mode=keys.mode, eot=keys.eot, **options)


def steps_of(opened: Run) -> list[str]:
    """Return the names of the steps of the evaluation, in order; each has a column of surviving images."""
    evaluate = opened.config.evaluate
    warm = evaluate.warm_start and opened.config.std is not None
    return [*([WARM_START] if warm else []), *evaluate.attacks]


class CrossCheck(Stage):
    """Attacks robust images with the unmodified pyautoattack package, and verifies in float32 which images it breaks.

    The package follows the surrogate's gradient of a mixed classifier (`as_bypass`).
    """

    of_mixture = True
    keys: EvaluateConfig
    chosen: frozenset[int] = frozenset()  # sample ids

    def content_hash(self, opened: Run) -> str:
        evaluated = stage_of(opened.config, "evaluate").content_hash(opened)
        return digest({"evaluate": evaluated, "check": self.keys.check, "check_n": self.keys.check_n})

    def task(self, opened: Run) -> Task:
        rows = stage_of(opened.config, "evaluate").rows(opened, ["sample_id", "robust"])
        robust = rows["sample_id"][rows["robust"]].tolist()
        n = min(self.keys.check_n or len(robust), len(robust))
        self.chosen = frozenset(robust[i * len(robust) // n] for i in range(n))
        return super().task(opened)

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        import torch

        from ..mixing.classifier import MixedClassifier
        from .published import pyautoattack_images

        x, y = worker.images(partition)
        model, name = worker.model, worker.model_name
        tried = torch.tensor([i in self.chosen for i in range(partition.start, partition.stop)], device=x.device)
        rows, x_adv, n_forward, n_backward = tried.nonzero().squeeze(1), x.clone(), 0, 0
        if len(rows):
            attacked = model.as_bypass() if isinstance(model, MixedClassifier) else model
            x_adv[rows], n_forward, n_backward = pyautoattack_images(
                attacked, x[rows], y[rows], threat=worker.spec.threat, budget=budget_of(self.keys),
                seed=worker.spec.seed, batch_size=worker.shape(x).rows,
            )  # fmt: skip
        clean, logits = worker.logits(model, x), worker.logits(model, x_adv)
        broken = tried & (logits.argmax(dim=1) != y)
        columns = {"tried": tried, "broken": broken, f"{name}_attacked": logits, "x_adv": x_adv}
        return columns, worker.counts(name, clean, y, tried & ~broken, n_forward, n_backward)


def cross_check(config: RunConfig) -> CrossCheck | None:
    """Return the cross-check of an evaluation; None if `evaluate.check` names no package."""
    return CrossCheck("check", config.evaluate) if config.evaluate.check else None

"""The cross-check of an evaluation: the unmodified pyautoattack package attacks the images that remain robust.

Shapes: B images of a partition, C x H x W, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..attacks.budget import AttackBudget
from ..config.run_config import digest
from ..distributed.executor import Executor
from ..distributed.tasks import Columns, Counts, Task
from ..storage.partitions import Partition
from .partitioned import run_partitions
from .progress import RunProgress
from .runs import Run
from .stage import budget_of, stage_of

if TYPE_CHECKING:
    from ..distributed.workbench import Workbench

CHECK = "check"  # the folder of the rows


@dataclass(frozen=True, kw_only=True)
class CheckTask(Task):
    """Attacks chosen images with pyautoattack, and verifies in float32 which of them it breaks.

    The package follows the surrogate's gradient of a mixed classifier (`as_bypass`).
    """

    budget: AttackBudget
    chosen: frozenset[int] = frozenset()  # sample ids

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        import torch

        from ..attacks.published import pyautoattack_images
        from ..mixing.classifier import MixedClassifier

        x, y = worker.images(partition)
        model, name = worker.model, worker.model_name
        tried = torch.tensor([i in self.chosen for i in range(partition.start, partition.stop)], device=x.device)
        rows, x_adv, n_forward, n_backward = tried.nonzero().squeeze(1), x.clone(), 0, 0
        if len(rows):
            attacked = model.as_bypass() if isinstance(model, MixedClassifier) else model
            x_adv[rows], n_forward, n_backward = pyautoattack_images(
                attacked, x[rows], y[rows], threat=worker.spec.threat, budget=self.budget, seed=worker.spec.seed,
                batch_size=worker.shape(x).rows,
            )  # fmt: skip
        clean, logits = worker.logits(model, x), worker.logits(model, x_adv)
        broken = tried & (logits.argmax(dim=1) != y)
        columns = {"tried": tried, "broken": broken, f"{name}_attacked": logits, "x_adv": x_adv}
        return columns, worker.counts(name, clean, y, tried & ~broken, n_forward, n_backward)


def cross_check(opened: Run, executor: Executor | None, progress: RunProgress) -> None:
    """Attack `evaluate.check_n` of the images that remain robust, if the configuration names a package.

    Raises:
        PartitionFailed: if partitions fail repeatedly.
    """
    evaluate = opened.config.evaluate
    if evaluate.check is None:
        return
    task = stage_of(opened.config, "evaluate").task(opened)
    rows = opened.columns(task.stage, task.content_hash, ["sample_id", "robust"])
    robust = rows["sample_id"][rows["robust"]].tolist()
    n = min(evaluate.check_n or len(robust), len(robust))
    check = CheckTask(
        stage=CHECK,
        content_hash=check_content_hash(opened, task.content_hash),
        mixture=task.mixture,
        budget=budget_of(evaluate),
        chosen=frozenset(robust[i * len(robust) // n] for i in range(n)),
    )
    run_partitions(opened, check, executor, progress)


def check_content_hash(opened: Run, evaluated: str) -> str:
    """Return 8 hex digits of everything that determines the rows; `evaluated` is that hash of the evaluation."""
    evaluate = opened.config.evaluate
    return digest({"evaluate": evaluated, "check": evaluate.check, "check_n": evaluate.check_n})

"""The individual stage runs each attack of the evaluation alone on all images.

The evaluate stage runs an attack only on the images that the attacks before it did not break. Here, no attack sees the
adversarial examples of another one or of the attack stage (AutoAttack's `run_standard_evaluation_individual`). The
joint attack on a mixed classifier belongs to APGD-T, as in the evaluation.

Shapes: B images of a partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config.register import STAGES
from ..config.run_config import digest
from ..distributed.tasks import Columns, Counts, Task
from ..storage.partitions import Partition
from ..storage.tables import SURVIVED
from .evaluate import attacked_as
from .runs import Run
from .stage import Stage, stage_of

if TYPE_CHECKING:
    from ..distributed.workbench import Workbench


@STAGES("individual", describes="each attack of `evaluate` alone, on all images", order=4)
class Individual(Stage):
    """Counts the images that each attack alone breaks, of the deployed mixed classifier or, without `std`, of `rob`."""

    of_mixture = True

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        import torch

        _, y = worker.images(partition)
        outcomes = {
            attack: attacked_as(self.evaluate, worker, partition, (attack,), name=attack)
            for attack in self.evaluate.attacks
        }
        columns = {f"{SURVIVED}{attack}": outcome.robust for attack, outcome in outcomes.items()}
        columns["robust"] = torch.stack([outcome.robust for outcome in outcomes.values()]).all(dim=0)
        passes = [sum(getattr(outcome, kind) for outcome in outcomes.values()) for kind in ("n_forward", "n_backward")]
        clean = next(iter(outcomes.values())).clean
        return columns, worker.counts(worker.model_name, clean, y, columns["robust"], *passes)

    def content_hash(self, opened: Run) -> str:
        return digest({"individual": stage_of(opened.config, "evaluate").content_hash(opened)})

    def task(self, opened: Run) -> Task:
        self.evaluate = opened.config.evaluate
        return super().task(opened)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        return stage_of(opened.config, "evaluate").passes(opened)

    def words(self) -> str:
        return "each attack alone; an image is robust if no attack breaks it"

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """Return one row per attack, and one for the images that no attack breaks."""
        columns = {attack: f"{SURVIVED}{attack}" for attack in opened.config.evaluate.attacks}
        columns["all of them"] = "robust"
        found = self.rows(opened, [*columns.values()])
        rows: list[list[object]] = [[name, found[column]] for name, column in columns.items()]
        return {"individual attacks, each on all images": (["attack", "robust"], rows)}

"""The individual stage: each of the evaluation's attacks on all images, as if it were alone.

The evaluate stage asks what an attack adds to those before it; this one what each leaves by itself, and what is left by
all (AutoAttack's `run_standard_evaluation_individual`). No attack sees the points of another, nor those of the attack
stage. The joint attack on a mixture belongs to APGD-T, as in the evaluation.

Shapes: B images of a piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.register import STAGES
from ..config.run_config import digest
from ..distributed.tasks import Columns, Summary
from ..storage.partitions import Partition
from ..storage.tables import SURVIVED
from .evaluate import EvaluateTask
from .runs import Run
from .stage import Stage, stage_of

if TYPE_CHECKING:
    from ..distributed.workbench import Workbench


@STAGES("individual", describes="each attack of `evaluate` alone, on all images", order=4)
class Individual(Stage):
    """What each attack alone leaves of the deployed mixture, or of rob where there is no std."""

    needs = ("attack",)
    of_mixture = True

    def fingerprint(self, opened: Run) -> str:
        return digest({"individual": stage_of(opened.config, "evaluate").fingerprint(opened)})

    def task(self, opened: Run) -> IndividualTask:
        task = stage_of(opened.config, "evaluate").task(opened)
        assert isinstance(task, EvaluateTask)
        return IndividualTask(**vars(task) | {"stage": self.name, "fingerprint": self.fingerprint(opened)})

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        return stage_of(opened.config, "evaluate").passes(opened)

    def words(self) -> str:
        return "each attack by itself; robust are the images that stand after all"

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """A row an attack, and one for the images that no attack breaks."""
        attacks = opened.config.evaluate.attacks
        columns = [f"{SURVIVED}{attack}" for attack in attacks]
        kept = self.rows(opened, [*columns, "robust"])
        counts = {**dict(zip(attacks, columns, strict=True)), "all of them": "robust"}
        rows: list[list[object]] = [
            [name, (int(kept[column].sum()), len(kept[column]))] for name, column in counts.items()
        ]
        return {"individual attacks, each on all images": (["attack", "robust"], rows)}


@dataclass(frozen=True, kw_only=True)
class IndividualTask(EvaluateTask):
    """The attacks of an evaluation, each from the clean images."""

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        import torch

        from ..attacks.adaptive import attack_result, ensemble_engine

        x, y = worker.images(piece)
        robust, columns, n_forward, n_backward = torch.ones_like(y, dtype=torch.bool), {}, 0, 0
        for attack in self.attacks:
            make = partial(
                ensemble_engine, worker.model, x, threat=worker.spec.threat, attacks=(attack,), mode=self.mode,
                seed=worker.spec.seed, budget=self.budget, shape=worker.shape(x), copies=worker.copies,
                eot=self.eot,
            )  # fmt: skip
            engine, finished = worker.attacked(piece, make, name=attack)
            outcome = attack_result(engine, (attack,), finished)
            columns[f"{SURVIVED}{attack}"] = outcome.robust
            robust &= outcome.robust
            n_forward, n_backward = n_forward + outcome.n_forward, n_backward + outcome.n_backward
        clean = worker.logits(worker.model, x)
        columns["robust"] = robust
        return columns, worker.summary(worker.model_name, clean, y, robust, n_forward, n_backward)

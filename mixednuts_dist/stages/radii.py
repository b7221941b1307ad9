"""The radii stage: robust accuracy over the radius for std, rob and the mixture.

The run's radius is the reference: the search chooses beta there, and its stored points are where the other radii begin.

Shapes: B images of a piece, R radii.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field, field_validator

from ..attacks.budget import AttackBudget
from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..config.section import Section, read_fraction
from ..config.threat import ThreatModel
from ..distributed.tasks import Columns, Summary
from ..errors import InvalidInputError
from ..storage.partitions import Partition
from .attack import ATTACKS_OF
from .evaluate import EvaluateTask
from .runs import Run
from .stage import Outcome, Stage, budget_of, classifier_names, stage_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..attacks.radius_curve import Reference
    from ..distributed.workbench import Workbench


class RadiiKeys(Section):
    """Where robustness is measured beside the threat model's own radius."""

    eps: tuple[Annotated[float, BeforeValidator(read_fraction)], ...] = Field(
        min_length=1, max_length=32, description="ascending radii of the run's norm; its own may be among them"
    )

    @field_validator("eps")
    @classmethod
    def _ascending(cls, eps: tuple[float, ...]) -> tuple[float, ...]:
        if any(not radius > 0 for radius in eps):
            raise ValueError("radii must be positive; accuracy without an attack is the column `clean`")
        if any(first >= second for first, second in pairwise(eps)):
            raise ValueError("radii must ascend, each once; sort them and leave the repeated ones out")
        return eps


@STAGES("radii", describes="robust accuracy over the radius of std, rob and the mixture", order=5)
class Radii(Stage):
    """Which images of each classifier stand at each radius."""

    Keys = RadiiKeys
    keys: RadiiKeys
    needs = ("attack", "evaluate")
    of_mixture = True

    def asked(self, config: RunConfig) -> bool:
        """As any stage; a radius that the norm does not have, or a random classifier, is refused before any pass."""
        if config.evaluate.eot is not None:
            raise InvalidInputError(
                f"radii: evaluate.eot={config.evaluate.eot} admits a random classifier, whose verdicts are rates; a "
                "curve holds yes or no. Run one radius at a time, without `radii`"
            )
        return bool(self.threats(config))

    def threats(self, config: RunConfig) -> tuple[ThreatModel, ...]:
        """All radii, the run's among them, ascending.

        Raises:
            ThreatModelError: for a radius that the run's norm does not have.
        """
        radii = sorted({*self.keys.eps, config.threat.eps})
        return tuple(ThreatModel(config.threat.norm, eps) for eps in radii)

    def task(self, opened: Run) -> RadiiTask:
        config, evaluate = opened.config, stage_of(opened.config, "evaluate")
        task = evaluate.task(opened)
        assert isinstance(task, EvaluateTask)
        return RadiiTask(
            stage=self.name, fingerprint=self.fingerprint(opened), mixture=task.mixture, budget=task.budget,
            attacks=task.attacks, mode=task.mode, threats=self.threats(config), evaluated=task.fingerprint,
            attacked=opened.attack_fingerprint, base_attacks=ATTACKS_OF[config.attack.method],
            base_budget=budget_of(config.attack),
        )  # fmt: skip

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        """Of an image that the run's radius leaves open: it stands at one other radius, and falls early at the rest."""
        return stage_of(opened.config, "evaluate").passes(opened)

    def words(self) -> str:
        return "the evaluation's attacks at this radius"

    def robust(self, opened: Run) -> dict[str, Tensor]:
        """Classifier -> which images stand at each radius, (N, R) bool, and under "clean" which are right unattacked.

        Raises:
            MissingArtifact: where the stage has not finished.
        """
        names = classifier_names(opened.config)
        return self.rows(opened, [f"{name}_{what}" for name in names for what in ("clean", "robust")])

    def outcomes(self, opened: Run) -> list[Outcome]:
        """A row a classifier and radius, without the run's own radius, which has rows already."""
        rows, own = self.robust(opened), opened.config.threat.eps
        return [
            Outcome(
                f"{name}, {threat}", int(rows[f"{name}_clean"].sum()), int(robust_N.sum()), len(robust_N)
            )
            for name in classifier_names(opened.config)
            for threat, robust_N in zip(
                self.threats(opened.config), rows[f"{name}_robust"].unbind(dim=1), strict=True
            )
            if threat.eps != own
        ]  # fmt: skip

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """A row a radius."""
        rows, names = self.robust(opened), classifier_names(opened.config)
        total = len(rows[f"{names[0]}_clean"])
        clean: list[object] = ["0", *((int(rows[f"{name}_clean"].sum()), total) for name in names)]
        robust: list[list[object]] = [
            [str(threat).rpartition("eps = ")[2], *((int(rows[f"{name}_robust"][:, i].sum()), total) for name in names)]
            for i, threat in enumerate(self.threats(opened.config))
        ]
        return {f"robust accuracy over the radius, {opened.config.threat.norm}": (["eps", *names], [clean, *robust])}


@dataclass(frozen=True, kw_only=True)
class RadiiTask(EvaluateTask):
    """Radius curves of the mixture and its two classifiers, or of rob alone."""

    threats: tuple[ThreatModel, ...]
    evaluated: str | None  # fingerprint of the evaluation at the run's radius; None where this mixture has none
    bases: bool = True  # std and rob of a mixture too
    attacked: str  # and of the attack stage, whose rows say what std and rob lose there
    base_attacks: tuple[str, ...]
    base_budget: AttackBudget

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        from ..attacks.radius_curve import radius_curve

        x, y = worker.images(piece)
        columns, n_forward, n_backward = dict[str, "Tensor"](), 0, 0
        subjects = list(worker.uncut.items()) if self.mixture is not None and self.bases else []
        for done, (name, model) in enumerate([*subjects, (worker.model_name, worker.uncut_model)]):
            deployed = name == worker.model_name
            curve = radius_curve(
                model, x, y, threats=self.threats, attacks=self.attacks if deployed else self.base_attacks,
                budget=self.budget if deployed else self.base_budget, shape=worker.shape(x), seed=worker.spec.seed,
                mode=self.mode, arithmetic=worker.arithmetic, sample_ids=range(piece.start, piece.stop),
                reference=self._reference(worker, piece, name, deployed),
            )  # fmt: skip
            columns[f"{name}_clean"] = worker.logits(model, x).argmax(dim=1) == y
            columns[f"{name}_robust"] = curve.robust
            n_forward, n_backward = n_forward + curve.n_forward + len(x), n_backward + curve.n_backward
            worker.report(len(x) * (done + 1) / (len(subjects) + 1))
        clean, robust_B = worker.logits(worker.model, x), columns[f"{worker.model_name}_robust"][:, -1]
        return columns, worker.summary(worker.model_name, clean, y, robust_B, n_forward + len(x), n_backward)

    def _reference(self, worker: Workbench, piece: Partition, name: str, deployed: bool) -> Reference | None:
        """What the run has stored of a classifier at its own radius."""
        from ..attacks.radius_curve import Reference

        place = self.threats.index(worker.spec.threat)
        if deployed and self.evaluated is None:
            return None
        if deployed:
            robust_B, x_adv = (
                worker.stored(piece, "evaluate", str(self.evaluated), column) for column in ("robust", "x_adv")
            )
            return Reference(place, robust_B, x_adv)
        robust_B = ~worker.stored(piece, "attack", self.attacked, f"{name}_broken")
        return Reference(place, robust_B, worker.stored(piece, "attack", self.attacked, "x_adv"))

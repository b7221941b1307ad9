"""The attack stage: the margins that everything else reads, one partition a task.

Runs that differ only in search or evaluation share it: the rows are the same files.

Shapes: B images of a piece, C x H x W, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..attacks.budget import AttackBudget
from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..config.uris import is_black_box
from ..distributed.tasks import Columns, Summary, Task
from ..storage.partitions import Partition
from .progress import RunProgress
from .runs import Run
from .stage import Stage, attack_passes, budget_of, stage_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..attacks.result import AttackResult
    from ..attacks.scheduler import Scheduler
    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench
    from ..mixing.transforms import LogitMap

logger = logging.getLogger(__name__)

STD_ATTACKS = ("apgd-ce", "apgd-t")  # what std's robust accuracy is measured under
ATTACKS_OF = {"apgd": STD_ATTACKS, "square": ("square",)}  # a method's, on rob


@STAGES("attack", describes="the minimum-margin attack (MMAA) on the robust classifier", order=1)
class Attack(Stage):
    """MMAA on LayerNormed rob, and the plain APGD pair on std."""

    def asked(self, config: RunConfig) -> bool:
        return config.std is not None

    def fingerprint(self, opened: Run) -> str:
        return opened.attack_fingerprint

    def part(self, opened: Run) -> Run:
        return opened.searched

    def task(self, opened: Run) -> AttackTask:
        return attack_task(opened)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        attack, n_classes = opened.config.attack, opened.inputs.n_classes
        budget = budget_of(attack)
        of_std = attack_passes(STD_ATTACKS, budget, n_classes)
        of_rob = attack_passes(("square-margin",), budget, n_classes) if attack.method == "square" else of_std
        return {"rob": of_rob, "std": of_std}


def run(config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
    """MMAA on every image that is not yet attacked; returns the opened run.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    return stage_of(config, "attack").run(config, executor=executor, progress=progress)


def complete(opened: Run, executor: Executor | None, progress: RunProgress) -> None:
    """The stage on an opened run; errors as in `run`."""
    stage_of(opened.config, "attack").complete(opened, executor, progress)


# --- on a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttackTask(Task):
    """MMAA on LayerNormed rob, and the plain APGD pair on std (rob's images where std has no gradients)."""

    budget: AttackBudget
    stop_when_broken: bool = True
    method: str = "apgd"  # or "square", which asks rob for no gradient
    logit_map: LogitMap | None = None  # what rob's logits pass through under attack; LayerNorm by default

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        x, y = worker.images(piece)
        found = self._minimum_margins(worker, piece)
        columns = dict[str, "Tensor"]()
        rob_clean = worker.logits(worker.rob, x)
        columns |= {
            "rob_clean": rob_clean,
            "rob_attacked": worker.logits(worker.rob, found.x_adv),
            "margin": found.margin,
            "log_one_minus_margin": found.log_one_minus_margin,
            "rob_broken": found.broken,
            "x_adv": found.x_adv,
        }
        summary = worker.summary("rob", rob_clean, y, ~found.broken, found.n_forward, found.n_backward)
        if "std" in worker.networks:
            std_clean, there = worker.logits(worker.std, x), worker.logits(worker.std, found.x_adv)
            if is_black_box(str(worker.spec.std_uri)):  # only the adversarial examples of `rob` are tried
                attacked = there.where((std_clean.argmax(dim=1) == y)[:, None], std_clean)
                broken, n_forward, n_backward = attacked.argmax(dim=1) != y, 2 * len(y), 0
            else:
                std = self._std_attacked(worker, piece)
                attacked, broken, n_forward, n_backward = std.logits, std.broken, std.n_forward, std.n_backward
            columns |= {"std_clean": std_clean, "std_attacked": attacked, "std_broken": broken}
            columns["std_at_rob_attacked"] = there
            summary["n_forward"] += n_forward
            summary["n_backward"] += n_backward
        return columns, summary

    def _minimum_margins(self, worker: Workbench, piece: Partition) -> AttackResult:
        from ..attacks.adaptive import ensemble_engine
        from ..attacks.minimum_margin import MMAA, margin_plan

        x, _ = worker.images(piece)
        black_box = self.method == "square"

        def make() -> Scheduler:
            return ensemble_engine(
                self._mapped(worker, worker.rob), x, threat=worker.spec.threat,
                attacks=("square-margin",) if black_box else MMAA, planner=None if black_box else margin_plan,
                budget=self.budget, seed=worker.spec.seed, stop_when_broken=self.stop_when_broken,
                shape=worker.shape(x), copies=None if black_box else worker.copies,
            )  # fmt: skip

        return worker.attacked(piece, make, name="rob")

    def _mapped(self, worker: Workbench, rob: nn.Module) -> nn.Module:
        from torch import nn

        from ..mixing.transforms import LayerNormTransform

        return nn.Sequential(rob, self.logit_map or LayerNormTransform(worker.spec.ln_k))

    def _std_attacked(self, worker: Workbench, piece: Partition) -> AttackResult:
        from ..attacks.adaptive import ensemble_engine

        x, _ = worker.images(piece)

        def make() -> Scheduler:
            return ensemble_engine(
                worker.std, x, threat=worker.spec.threat, attacks=STD_ATTACKS, seed=worker.spec.seed,
                budget=self.budget, shape=worker.shape(x), copies=worker.copies,
            )  # fmt: skip

        return worker.attacked(piece, make, name="std")


def attack_task(opened: Run) -> AttackTask:
    """What the configuration asks of each partition."""
    attack = opened.config.attack
    return AttackTask(
        stage="attack",
        fingerprint=opened.attack_fingerprint,
        budget=budget_of(attack),
        stop_when_broken=attack.stop_when_broken,
        method=attack.method,
    )

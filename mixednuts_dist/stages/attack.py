"""The attack stage computes minimum-margin adversarial examples and margins, which all later stages read.

Runs that differ only in their search or evaluation share its rows.

Shapes: B images of a partition, C x H x W, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config.keys import AttackConfig
from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..distributed.tasks import Columns, Counts
from ..storage.partitions import Partition
from .runs import Run
from .stage import Stage, attack_passes, budget_of, stage_of

if TYPE_CHECKING:
    from ..attacks.result import AttackResult
    from ..distributed.workbench import Workbench
    from ..mixing.transforms import LogitMap

STD_ATTACKS = ("apgd-ce", "apgd-t")  # the attacks on the standard classifier
ATTACKS_OF = {"apgd": STD_ATTACKS, "square": ("square",)}  # `attack.method` -> attacks on the robust classifier


def run(config: RunConfig, **options: Any) -> Run:
    """Open the run of a configuration and complete this stage; arguments and errors as in `Stage.run`."""
    return stage_of(config, "attack").run(config, **options)


@STAGES("attack", describes="minimum-margin AutoAttack (MMAA) on the robust classifier", order=1)
class Attack(Stage):
    """Runs MMAA on the LayerNormed robust classifier, and APGD-CE and APGD-T on the standard one.

    A black-box `std` is tried on the adversarial examples for `rob` instead.
    """

    keys: AttackConfig
    logit_map: LogitMap | None = None  # instead of LayerNorm, for studies

    def asked(self, config: RunConfig) -> bool:
        return config.std is not None

    def content_hash(self, opened: Run) -> str:
        return opened.attack_content_hash

    def part(self, opened: Run) -> Run:
        return opened.searched

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        on_rob = ("square-margin",) if self.keys.method == "square" else STD_ATTACKS
        attacks, budget = {"rob": on_rob, "std": STD_ATTACKS}, budget_of(self.keys)
        return {role: attack_passes(names, budget, opened.inputs.n_classes) for role, names in attacks.items()}

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        x, y = worker.images(partition)
        found = self._minimum_margins(worker, partition)
        rob_clean = worker.logits(worker.rob, x)
        rob_broken = found.broken | (rob_clean.argmax(dim=1) != y)  # the passes of a random classifier may differ
        columns: Columns = {
            "rob_clean": rob_clean,
            "rob_attacked": worker.logits(worker.rob, found.x_adv),
            "margin": found.margin,
            "log_one_minus_margin": found.log_one_minus_margin,
            "rob_broken": rob_broken,
            "x_adv": found.x_adv,
        }
        counts = worker.counts("rob", rob_clean, y, ~rob_broken, found.n_forward, found.n_backward)
        if "std" in worker.networks:
            std_clean, there = worker.logits(worker.std, x), worker.logits(worker.std, found.x_adv)
            if worker.spec.classifiers["std"].is_black_box:  # only the adversarial examples of `rob` are tried
                attacked = there.where((std_clean.argmax(dim=1) == y)[:, None], std_clean)
                broken, n_forward, n_backward = attacked.argmax(dim=1) != y, 2 * len(y), 0
            else:
                std = worker.attacked(partition, worker.std, STD_ATTACKS, budget_of(self.keys), name="std")
                attacked, broken, n_forward, n_backward = std.logits, std.broken, std.n_forward, std.n_backward
            broken = broken | (std_clean.argmax(dim=1) != y)
            columns |= {"std_clean": std_clean, "std_attacked": attacked, "std_broken": broken}
            columns["std_at_rob_attacked"] = there
            counts["n_forward"] += n_forward
            counts["n_backward"] += n_backward
        return columns, counts

    def _minimum_margins(self, worker: Workbench, partition: Partition) -> AttackResult:
        from torch import nn

        from ..attacks.plans import MMAA, margin_plan
        from ..mixing.transforms import LayerNormTransform

        rob = nn.Sequential(worker.rob, self.logit_map or LayerNormTransform(worker.spec.ln_k))
        square = self.keys.method == "square"
        attacks = ("square-margin",) if square else MMAA
        options: dict[str, Any] = {"copies": None} if square else {"planner": margin_plan}
        options["stop_when_broken"] = self.keys.stop_when_broken
        return worker.attacked(partition, rob, attacks, budget_of(self.keys), name="rob", **options)

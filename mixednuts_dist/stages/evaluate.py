"""The evaluate stage: the adaptive AutoAttack on the mixture that the search deployed, or AutoAttack on rob alone.

Shapes: B images of a piece, C x H x W, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..attacks.budget import WARM_START, AttackBudget
from ..config.register import STAGES
from ..config.run_config import RunConfig, digest
from ..distributed.tasks import Columns, Summary, Task
from ..storage.partitions import Partition
from ..storage.records import Receipt, SearchResult
from ..storage.tables import FLAG, SURVIVED, read_columns
from .points import StoredPoints, hardest_points, held_points, points_of_round, read_points
from .progress import RunProgress
from .runs import Run, autoattack_fingerprint, evaluate_fingerprint, finished_partitions, require_complete
from .stage import Stage, attack_passes, budget_of, deployed_mixture, require_needs, stage_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..attacks.gradient_model import AttackMode
    from ..attacks.scheduler import Group, Scheduler
    from ..distributed.executor import Executor
    from ..distributed.workbench import Workbench
    from .early_stop import EarlyStop

_ROBUST_IMAGE_COSTS = 30  # times as much as a broken one
CHECK = "check"  # the folder of the second opinion's rows


@STAGES("evaluate", describes="the adaptive AutoAttack on the mixed classifier", order=2)
class Evaluate(Stage):
    """The adaptive AutoAttack on the deployed mixture; plain AutoAttack where there is rob alone."""

    needs = ("attack",)
    of_mixture = True

    def fingerprint(self, opened: Run) -> str:
        search = self.searched(opened)
        return evaluate_fingerprint(opened, search) if search else autoattack_fingerprint(opened)

    def task(self, opened: Run) -> EvaluateTask:
        search = self.searched(opened)
        return evaluate_task(opened, search) if search else autoattack_task(opened)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        evaluate = opened.config.evaluate
        passes = attack_passes(
            evaluate.attacks, budget_of(evaluate, opened.config.threat.norm), opened.inputs.n_classes
        )
        times = evaluate.eot or 1
        return {self.model_name(opened.config): (passes[0] * times, passes[1] * times)}

    def likely_share(self, opened: Run) -> tuple[float, str] | None:
        attacked = list(self._attacked(opened).values())
        if not attacked:
            return None
        share = sum(receipt.robust for receipt in attacked) / sum(receipt.n_images for receipt in attacked)
        return share, f"if the mixture keeps what rob keeps, {100 * share:.0f} % of the images"

    def costs(self, opened: Run) -> Mapping[Partition, float] | None:
        """What rob loses, the mixture mostly loses to the first attack, a cheap one."""
        return {
            part: one.robust + (one.n_images - one.robust) / _ROBUST_IMAGE_COSTS
            for part, one in self._attacked(opened).items()
        } or None

    def _attacked(self, opened: Run) -> Mapping[Partition, Receipt]:
        """The finished partitions of the attack stage; none without std."""
        if opened.config.std is None:
            return {}
        return finished_partitions(opened.searched, "attack", opened.attack_fingerprint)

    def complete(self, opened: Run, executor: Executor | None, progress: RunProgress) -> None:
        from .partitioned import run_partitions

        require_needs(self, opened)
        stop = early_stop_of(opened)
        run_partitions(opened, self.task(opened), executor, progress, self.costs(opened), early_stop=stop)

    def run(self, config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
        opened = super().run(config, executor=executor, progress=progress)
        check(opened, executor, progress or RunProgress())
        return opened


def run(config: RunConfig, *, executor: Executor | None = None, progress: RunProgress | None = None) -> Run:
    """Attack the mixed classifier (without std: rob) on every image not yet evaluated; returns the opened run.

    Raises:
        MissingArtifact: where there is a std, and the attack or the search stage has not finished.
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    return stage_of(config, "evaluate").run(config, executor=executor, progress=progress)


def complete(opened: Run, executor: Executor | None, progress: RunProgress) -> None:
    """The stage on an opened run; errors as in `run`."""
    stage_of(opened.config, "evaluate").complete(opened, executor, progress)


# --- on a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(Task):
    """The adaptive AutoAttack on a mixture; plain AutoAttack on rob alone where there is none."""

    budget: AttackBudget
    attacks: tuple[str, ...] = ()
    mode: AttackMode = "transfer"
    eot: int | None = None  # draws of a random classifier
    points: tuple[StoredPoints, ...] = ()  # tried before any attack
    given: str | None = None  # a file of points that somebody handed in, likewise

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        from ..attacks.gradient_model import AttackedModel
        from ..attacks.red_flags import raised_flags

        x, y = worker.images(piece)
        model, name = worker.model, worker.model_name

        def with_points(piece: Partition) -> Group:
            group, points = worker.group(piece), read_points(worker, piece, self.points)
            if self.given is not None:
                points.append(held_points(worker, piece, self.given).tried)
            return replace(group, known=hardest_points(worker, model, group.x, group.y, points)) if points else group

        outcome = worker.attacked(piece, self.engine(worker, x, self.attacks), group=with_points)
        clean = worker.logits(model, x)
        attacked = AttackedModel.of(model, mode=self.mode)
        flags = raised_flags(attacked, x, y, outcome.unconfirmed, batch_size=worker.shape(x))
        columns = {
            f"{name}_clean": clean,
            f"{name}_attacked": outcome.logits,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            **{f"{FLAG}{flag}": raised for flag, raised in flags.items()},
            "x_adv": outcome.x_adv,
        }
        return columns, worker.summary(name, clean, y, outcome.robust, outcome.n_forward, outcome.n_backward)

    def engine(self, worker: Workbench, x: Tensor, attacks: Sequence[str]) -> Callable[[], Scheduler]:
        """Return a function that starts the engine of these attacks on the classifier that the task is about."""
        from ..attacks.adaptive import ensemble_engine

        return partial(
            ensemble_engine, worker.model, x, threat=worker.spec.threat, attacks=attacks, mode=self.mode,
            seed=worker.spec.seed, budget=self.budget, shape=worker.shape(x), copies=worker.copies, eot=self.eot,
        )  # fmt: skip


def autoattack_task(opened: Run) -> EvaluateTask:
    """What the configuration asks of each partition where there is no std; needs no earlier stage."""
    evaluate = opened.config.evaluate
    if evaluate.eot is not None:
        from ..attacks.draws import check_eot

        check_eot(evaluate.eot, evaluate.attacks)
    return EvaluateTask(
        stage="evaluate",
        fingerprint=autoattack_fingerprint(opened),
        budget=budget_of(evaluate, opened.config.threat.norm),
        attacks=tuple(evaluate.attacks),
        mode=evaluate.mode,
        eot=evaluate.eot,
        given=evaluate.points,
    )


def evaluate_task(opened: Run, search: SearchResult) -> EvaluateTask:
    """What the configuration asks of each partition, for the mixture that the search deployed."""
    return replace(
        autoattack_task(opened),
        fingerprint=evaluate_fingerprint(opened, search),
        mixture=deployed_mixture(opened, search),
        points=tuple(
            replace(source, n_images=opened.config.search.first)
            for source in (
                StoredPoints("attack", opened.attack_fingerprint),
                *(points_of_round(round_) for round_ in search.rounds),
            )
            if opened.config.evaluate.warm_start
        ),
    )


def steps_of(opened: Run) -> list[str]:
    """What the rows' columns say survived, in order."""
    evaluate = opened.config.evaluate
    warm = (evaluate.warm_start and opened.config.std is not None) or evaluate.points is not None
    return [*([WARM_START] if warm else []), *evaluate.attacks]


# --- where an evaluation may end early --------------------------------------------------------------------------------


def early_stop_of(opened: Run) -> EarlyStop | None:
    """Where `evaluate.until` asks for it: nothing seen yet."""
    until = opened.config.evaluate.until
    if until is None:
        return None
    from .early_stop import EarlyStop

    return EarlyStop(opened.partitions, opened.config.seed, until)


def evaluated_part(opened: Run, fingerprint: str) -> tuple[Run, tuple[str, ...]]:
    """The run as far as its evaluation counts, and what that lets say of the rest: all of it, unless `evaluate.until`.

    Partitions that were finished beyond those that were needed do not count: they are the ones that are quick.

    Raises:
        MissingArtifact: where the evaluation has not finished.
    """
    stop, finished = early_stop_of(opened), finished_partitions(opened, "evaluate", fingerprint)
    if stop is None or len(finished) == len(opened.partitions) or not stop.enough(finished.values()):
        require_complete(opened, "evaluate", fingerprint)
        return opened, ()
    counted = replace(opened, only=tuple(stop.counted))
    return counted, (f"evaluate.until = {opened.config.evaluate.until:g}: {stop.sentence()}. All counts are of those.",)


# --- the second opinion -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckTask(Task):
    """A second opinion: the unmodified pyautoattack on the classifier that an `EvaluateTask` has attacked.

    It gets a mixed classifier with the surrogate's gradient (`as_bypass`). Float32 verification decides which
    images are broken.
    """

    budget: AttackBudget
    chosen: frozenset[int] = frozenset()  # sample ids of the images that it attacks

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        import torch

        from ..attacks.published import pyautoattack_images
        from ..mixing.classifier import MixedClassifier

        x, y = worker.images(piece)
        model, name = worker.model, worker.model_name
        tried = torch.tensor([i in self.chosen for i in range(piece.start, piece.stop)], device=x.device)
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
        return columns, worker.summary(name, clean, y, tried & ~broken, n_forward, n_backward)


def check(opened: Run, executor: Executor | None, progress: RunProgress) -> None:
    """The second opinion on the images that stand after the stage, where the configuration asks for one.

    Raises:
        PartitionFailed: as the stage.
    """
    from .partitioned import run_partitions

    if opened.config.evaluate.check is None:
        return
    task = stage_of(opened.config, "evaluate").task(opened)
    opened, _ = evaluated_part(opened, task.fingerprint)
    rows = read_columns(opened.rows, task.stage, opened.partitions, task.fingerprint, ["sample_id", "robust"])
    standing = rows["sample_id"][rows["robust"]].tolist()
    n = min(opened.config.evaluate.check_n or len(standing), len(standing))
    opinion = CheckTask(
        stage=CHECK,
        fingerprint=check_fingerprint(opened, task.fingerprint),
        mixture=task.mixture,
        budget=budget_of(opened.config.evaluate),
        chosen=frozenset(standing[i * len(standing) // n] for i in range(n)),
    )
    run_partitions(opened, opinion, executor, progress)


def check_fingerprint(opened: Run, evaluated: str) -> str:
    """8 hex digits of what the second opinion's rows depend on; `evaluated` is the evaluate stage's fingerprint."""
    evaluate = opened.config.evaluate
    return digest({"evaluate": evaluated, "check": evaluate.check, "check_n": evaluate.check_n})

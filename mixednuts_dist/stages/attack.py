"""The attack stage: the margins that everything else reads, one partition a task."""

from ..config import RunConfig
from ..distributed.cluster import RaySession
from ..distributed.tasks import AttackTask
from .adoption import adopt_attack
from .partitioned import budget_of, run_partitions
from .progress import Progress, Silent
from .runs import Run, open_run


def run(config: RunConfig, *, session: RaySession | None = None, progress: Progress | None = None) -> Run:
    """MMAA on every image that is not yet attacked; returns the opened run.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    opened = open_run(config)
    complete(opened, session, progress or Silent())
    return opened


def complete(opened: Run, session: RaySession | None, progress: Progress) -> None:
    """The stage on an opened run; errors as in `run`."""
    adopt_attack(opened)
    run_partitions(opened, attack_task(opened), session, progress)


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

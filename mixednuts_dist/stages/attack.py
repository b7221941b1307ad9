"""The attack stage: the margins that everything else reads, one partition a task.

Runs that differ only in search or evaluation share it: paid work is copied, never repeated.
"""

import logging

import yaml

from ..config import RunConfig
from ..distributed.executor import Executor
from ..distributed.tasks import AttackTask
from ..errors import MissingArtifact
from ..storage.partitions import Partition
from ..storage.store import Store
from ..storage.tables import is_whole
from .partitioned import Progress, Silent, budget_of, run_partitions
from .runs import Run, finished_partitions, open_run

logger = logging.getLogger(__name__)


def run(config: RunConfig, *, session: Executor | None = None, progress: Progress | None = None) -> Run:
    """MMAA on every image that is not yet attacked; returns the opened run.

    Raises:
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    opened = open_run(config)
    complete(opened, session, progress or Silent())
    return opened


def complete(opened: Run, session: Executor | None, progress: Progress) -> None:
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


def adopt_attack(opened: Run) -> None:
    """Copy missing attack partitions from runs of the same name whose attack stage is the same to the bit."""
    missing = set(opened.partitions) - set(finished_partitions(opened, "attack", opened.attack_fingerprint))
    for store in siblings(opened.config).values() if missing else ():
        missing -= _copy(Run(opened.config, store, opened.inputs), opened, missing)


def siblings(config: RunConfig) -> dict[str, Store]:
    """Run id -> folder of the other runs of this name in the same storage."""
    root, own = Store(config.storage), config.run_id()
    names = (name for name in root.names("") if name.startswith(f"{config.name}-") and name != own)
    return {name: root.child(name) for name in names}


def _copy(sibling: Run, opened: Run, missing: set[Partition]) -> set[Partition]:
    """Copies of those partitions that the sibling has; none where its attack is another."""
    if not missing or not _same_attack(sibling, opened.attack_fingerprint):
        return set()
    theirs = missing & set(finished_partitions(sibling, "attack", opened.attack_fingerprint))
    copied = {partition for partition in theirs if _copy_file(sibling, opened, f"attack/{partition.file_name}")}
    if copied:
        logger.info("took %d finished attack partitions over from %s", len(copied), sibling.store.uri)
    return copied


def _copy_file(sibling: Run, opened: Run, path: str) -> bool:
    """Through this process and not within the storage, so that a damaged file is not taken over again and again."""
    content = sibling.store.read(path)
    if is_whole(content):
        opened.store.write(path, content)
        return True
    logger.warning("%s is damaged and is not taken over", sibling.store.address(path))
    return False


def _same_attack(sibling: Run, fingerprint: str) -> bool:
    try:
        content = yaml.safe_load(sibling.store.read("run.yaml"))
    except (MissingArtifact, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and content.get("attack_fingerprint") == fingerprint

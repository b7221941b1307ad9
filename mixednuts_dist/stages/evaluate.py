"""The evaluate stage: the adaptive AutoAttack on the mixture that the search deployed, or AutoAttack on rob alone."""

from collections.abc import Callable
from dataclasses import replace

from ..config import RunConfig, digest
from ..distributed.executor import Executor
from ..distributed.tasks import CheckTask, EvaluateTask, StoredPoints
from ..storage.records import SearchResult
from ..storage.store import Store, concurrently
from ..storage.tables import read_columns, read_footer
from .partitioned import Progress, Screening, Silent, budget_of, run_partitions
from .rounds import stored_points
from .runs import (
    Run,
    autoattack_fingerprint,
    evaluate_fingerprint,
    finished_partitions,
    open_run,
    read_search_result,
    require_complete,
)

_ROBUST_IMAGE_COSTS = 30  # times as much as a broken one
CHECK = "check"  # the folder of the second opinion's rows
CACHED = "cached"  # the attack stage's images, tried before anything else


def run(config: RunConfig, *, session: Executor | None = None, progress: Progress | None = None) -> Run:
    """Attack the mixed classifier (without std: rob) on every image not yet evaluated; returns the opened run.

    Raises:
        MissingArtifact: where there is a std, and the attack or the search stage has not finished.
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    opened = open_run(config)
    complete(opened, session, progress or Silent())
    check(opened, session, progress or Silent())
    return opened


def complete(opened: Run, session: Executor | None, progress: Progress) -> None:
    """The stage on an opened run; errors as in `run`."""
    if opened.config.std is None:
        run_partitions(opened, autoattack_task(opened), session, progress, screening=screening_of(opened))
        return
    attacked = require_complete(opened, "attack", opened.attack_fingerprint)
    # What rob loses, the mixture mostly loses to the first attack, a cheap one.
    weights = {part: one.robust + (one.n_images - one.robust) / _ROBUST_IMAGE_COSTS for part, one in attacked.items()}
    result = read_search_result(opened)
    _clear_superseded(opened, result)
    run_partitions(opened, evaluate_task(opened, result), session, progress, weights, screening=screening_of(opened))


def screening_of(opened: Run) -> Screening | None:
    """Where `evaluate.until` asks for it: nothing seen yet."""
    until = opened.config.evaluate.until
    return None if until is None else Screening(opened.partitions, opened.config.seed, until)


def evaluated_part(opened: Run, fingerprint: str) -> tuple[Run, tuple[str, ...]]:
    """The run as far as its evaluation counts, and what that lets say of the rest: all of it, unless `evaluate.until`.

    Partitions that were finished beyond those that were needed do not count: they are the ones that are quick.

    Raises:
        MissingArtifact: where the evaluation has not finished.
    """
    screening, finished = screening_of(opened), finished_partitions(opened, "evaluate", fingerprint)
    if screening is None or len(finished) == len(opened.partitions) or not screening.enough(finished.values()):
        require_complete(opened, "evaluate", fingerprint)
        return opened, ()
    counted = replace(opened, only=tuple(screening.counted))
    return counted, (
        f"evaluate.until = {opened.config.evaluate.until:g}: {screening.told()}. All counts are of those.",
    )


def check(opened: Run, session: Executor | None, progress: Progress) -> None:
    """The second opinion on the images that stand after the stage, where the configuration asks for one.

    Raises:
        PartitionFailed: as the stage.
    """
    if opened.config.evaluate.check is None:
        return
    alone = opened.config.std is None
    task = autoattack_task(opened) if alone else evaluate_task(opened, read_search_result(opened))
    opened, _ = evaluated_part(opened, task.fingerprint)
    rows = read_columns(opened.store, task.stage, opened.partitions, task.fingerprint, ["sample_id", "robust"])
    standing = rows["sample_id"][rows["robust"]].tolist()
    n = min(opened.config.evaluate.check_n or len(standing), len(standing))
    chosen = frozenset(standing[i * len(standing) // n] for i in range(n))
    asked = {**vars(task), "stage": CHECK, "fingerprint": check_fingerprint(opened, task.fingerprint)}
    # An opinion on another choice, or on other images, is replaced.
    _delete_rows(opened.store, CHECK, lambda fingerprint: fingerprint != asked["fingerprint"])
    # Whole partitions: the package's noise depends on the batch.
    run_partitions(opened, CheckTask(**asked, chosen=chosen), session, progress, smallest=opened.config.partition_size)


def check_fingerprint(opened: Run, evaluated: str) -> str:
    """8 hex digits of what the second opinion's rows depend on; `evaluated` is the evaluate stage's fingerprint."""
    evaluate = opened.config.evaluate
    return digest({"evaluate": evaluated, "check": evaluate.check, "check_n": evaluate.check_n})


def _clear_superseded(opened: Run, result: SearchResult) -> None:
    """Remove the rows of choices that a later round has replaced; their images are among that round's points."""
    superseded = {done.evaluated for done in result.rounds if done.evaluated}
    if superseded:
        _delete_rows(opened.store, "evaluate", superseded.__contains__)


def _delete_rows(store: Store, folder: str, unwanted: Callable[[str], bool]) -> None:
    """Remove a folder's files of these fingerprints."""

    def look(name: str) -> None:
        footer = read_footer(store, f"{folder}/{name}")
        if footer is not None and unwanted(footer.fingerprint):
            store.delete(f"{folder}/{name}")

    concurrently(look, [name for name in store.names(folder) if name.endswith(".parquet")])


def autoattack_task(opened: Run) -> EvaluateTask:
    """What the configuration asks of each partition where there is no std; needs no earlier stage."""
    evaluate = opened.config.evaluate
    return EvaluateTask(
        stage="evaluate",
        fingerprint=autoattack_fingerprint(opened),
        budget=budget_of(evaluate),
        attacks=tuple(evaluate.attacks),
    )


def evaluate_task(opened: Run, search: SearchResult) -> EvaluateTask:
    """What the configuration asks of each partition, for the mixture that the search deployed."""
    evaluate = opened.config.evaluate
    return replace(
        autoattack_task(opened),
        fingerprint=evaluate_fingerprint(opened, search),
        mixture=search.deployed().mixture(),
        mode=evaluate.mode,
        surrogate_alpha=search.surrogate_alpha,
        rd=evaluate.rd,
        points=(
            StoredPoints("attack", opened.attack_fingerprint),
            *(stored_points(round_) for round_ in search.rounds),
        ),
    )

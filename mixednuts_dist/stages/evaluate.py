"""The evaluate stage: the adaptive AutoAttack on the mixture that the search deployed."""

from dataclasses import asdict

from ..attacks.adaptive import AttackBudget
from ..config import RunConfig, digest
from ..data.records import SearchResult
from ..distributed.cluster import RaySession
from ..distributed.worker import EvaluateTask
from .attack import run_partitions
from .progress import Progress, Silent
from .runs import Run, open_run, require_complete
from .search import read_search_result

CACHED = "cached"  # the attack stage's images, tried before anything else


def run(config: RunConfig, *, session: RaySession | None = None, progress: Progress | None = None) -> Run:
    """Attack the mixed classifier on every image that is not yet evaluated; returns the opened run.

    Raises:
        MissingArtifact: where the attack or the search stage has not finished.
        PartitionFailed: where partitions failed all of their tries; the others are finished first.
    """
    opened = open_run(config)
    complete(opened, session, progress or Silent())
    return opened


def complete(opened: Run, session: RaySession | None, progress: Progress) -> None:
    """The stage on an opened run; errors as in `run`."""
    require_complete(opened, "attack", opened.attack_fingerprint)
    run_partitions(opened, _task(opened, read_search_result(opened)), session, progress)


def evaluate_fingerprint(opened: Run, search: SearchResult) -> str:
    """8 hex digits of all that the evaluate stage's rows depend on, the deployed parameters included."""
    deployed = {"alpha_d": search.surrogate_alpha, **asdict(search.deployed())}
    evaluate = opened.config.evaluate.model_dump(mode="json")
    return digest({"attack": opened.attack_fingerprint, "deployed": deployed, "evaluate": evaluate})


def _task(opened: Run, search: SearchResult) -> EvaluateTask:
    config = opened.config
    budget = AttackBudget(
        config.evaluate.n_iter,
        config.evaluate.n_target_classes,
        config.evaluate.n_queries,
        config.compute.batch_size,
    )
    return EvaluateTask(
        fingerprint=evaluate_fingerprint(opened, search),
        attack_fingerprint=opened.attack_fingerprint,
        search=search,
        attacks=tuple(config.evaluate.attacks),
        mode=config.evaluate.mode,
        budget=budget,
        rd=config.evaluate.rd,
    )

"""What a run will cost, before it starts: seconds a pass, measured on one worker, times the passes that are known.

An image that survives everything takes a number of passes that the configuration fixes; one that breaks takes far
fewer, mostly a few. So passes times images is an upper bound, up to the repeats for the few images that survive by a
hair. It gets closer with every finished partition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..attacks.budget import AttackBudget
from ..config import RunConfig
from ..distributed.attacker import STD_ATTACKS
from ..distributed.executor import Executor, executing
from ..distributed.worker import PassSeconds
from ..register import ATTACKS
from ..storage.records import Receipt
from .partitioned import budget_of, worker_spec
from .runs import (
    SELECTED,
    Run,
    autoattack_fingerprint,
    evaluate_fingerprint,
    finished_partitions,
    open_run,
    read_search_result,
)


@dataclass(frozen=True)
class StageEstimate:
    """Worker-seconds that a stage still takes."""

    stage: str
    images_left: int
    passes: tuple[int, int]  # forward and backward, of an image that survives everything
    at_most: float  # worker-seconds, if every image did
    likely: float | None  # worker-seconds, going by what is finished; None before anything is
    basis: str  # of `likely`, in words


@dataclass(frozen=True)
class Estimate:
    """All of a run on the cluster as it is."""

    stages: tuple[StageEstimate, ...]
    pass_seconds: dict[str, PassSeconds]
    n_workers: int
    devices_each: float  # accelerators a worker, or cores where there are none
    unit: str  # "GPU" or "core"


def run(config: RunConfig, *, session: Executor | None = None) -> Estimate:
    """Measure on one worker; errors as in the attack stage."""
    opened, compute = open_run(config), config.compute
    with executing(session, compute) as used:
        settings = used.workers(compute)
        measured = used.time_passes(worker_spec(opened), settings)
    return Estimate(
        stages=_stages(opened, measured),
        pass_seconds=measured,
        n_workers=settings.n_workers,
        devices_each=settings.num_gpus or settings.num_cpus,
        unit="GPU" if settings.num_gpus else "core",
    )


def attack_passes(attacks: Sequence[str], budget: AttackBudget, n_classes: int) -> tuple[int, int]:
    """(forward, backward) of an image that survives the attacks once, as their register entries say.

    Added are the clean image's pass, that at the stored points and the last verdict's; those in between are few.
    """
    each = [ATTACKS.get(attack).passes(budget, n_classes) for attack in attacks]
    return sum(forward for forward, _ in each) + 3, sum(backward for _, backward in each)


def _stages(opened: Run, measured: dict[str, PassSeconds]) -> tuple[StageEstimate, ...]:
    if opened.config.std is None:
        done = finished_partitions(opened, "evaluate", autoattack_fingerprint(opened))
        return (_evaluate(opened, measured["rob"], list(done.values()), []),)
    attacked = list(finished_partitions(opened, "attack", opened.attack_fingerprint).values())
    evaluated: list[Receipt] = []
    if opened.store.exists(SELECTED):
        fingerprint = evaluate_fingerprint(opened, read_search_result(opened))
        evaluated = list(finished_partitions(opened, "evaluate", fingerprint).values())
    return _attack(opened, measured, attacked), _evaluate(opened, measured["mixed"], evaluated, attacked)


def _attack(opened: Run, measured: dict[str, PassSeconds], receipts: Sequence[Receipt]) -> StageEstimate:
    attack = opened.config.attack
    budget, n_classes = budget_of(attack), opened.inputs.n_classes
    of_std = attack_passes(STD_ATTACKS, budget, n_classes)
    passes = attack_passes(("square-margin",), budget, n_classes) if attack.method == "square" else of_std
    left = _images_left(opened, receipts)
    at_most = left * (measured["std"].of(*of_std) + measured["rob"].of(*passes))
    return StageEstimate("attack", left, passes, at_most, _like_before(receipts, left), "from what is attacked already")


def _evaluate(
    opened: Run, seconds: PassSeconds, receipts: Sequence[Receipt], attacked: Sequence[Receipt]
) -> StageEstimate:
    evaluate = opened.config.evaluate
    passes = attack_passes(evaluate.attacks, budget_of(evaluate), opened.inputs.n_classes)
    left = _images_left(opened, receipts)
    at_most = left * seconds.of(*passes)
    likely, basis = _like_before(receipts, left), "from what is evaluated already"
    if likely is None and attacked:
        share = sum(receipt.robust for receipt in attacked) / sum(receipt.n_images for receipt in attacked)
        likely, basis = at_most * share, f"if the mixture keeps what rob keeps, {100 * share:.0f} % of the images"
    return StageEstimate("evaluate", left, passes, at_most, likely, basis)


def _images_left(opened: Run, receipts: Sequence[Receipt]) -> int:
    return opened.inputs.n_images - sum(receipt.n_images for receipt in receipts)


def _like_before(receipts: Sequence[Receipt], left: int) -> float | None:
    """What is left, at the seconds an image that the finished partitions took."""
    if not receipts:
        return None
    return left * sum(receipt.seconds for receipt in receipts) / sum(receipt.n_images for receipt in receipts)

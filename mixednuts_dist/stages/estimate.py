"""Estimate the cost of a run: seconds per pass, measured on one worker, times the number of passes.

The configuration determines the passes of an image that survives all attacks; an image that breaks takes far fewer. The
product is an upper bound, except that borderline images are attacked again. `status` predicts the rest from the
duration of the finished partitions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.run_config import RunConfig
from ..distributed.executor import Executor, executing
from ..distributed.worker_spec import PassSeconds
from ..errors import MissingArtifact
from .choosing import attacks_its_choice
from .partitioned import worker_spec
from .rounds import SHARES_ATTACKED, round_attacks, round_budget
from .runs import Run, open_run
from .search_result import SELECTED
from .stage import Stage, attack_passes, stages_of


@dataclass(frozen=True)
class StageEstimate:
    """The worker-seconds that a stage still takes."""

    stage: str
    images_left: int
    passes: tuple[int, int]  # forward and backward passes of its classifier for the most expensive image
    at_most: float  # worker-seconds if every image takes that many passes, including the passes of `std`
    which: str = "images left"  # what `images_left` counts


@dataclass(frozen=True)
class Estimate:
    """The cost of all stages with the workers that are available."""

    stages: tuple[StageEstimate, ...]
    pass_seconds: dict[str, PassSeconds]
    n_workers: int
    devices_each: float  # accelerators per worker or, without an accelerator, cores
    unit: str  # "GPU" or "core"


def run(config: RunConfig, *, executor: Executor | None = None) -> Estimate:
    """Time a few batches on one worker, and return the cost of each stage; errors as in the attack stage."""
    opened, compute = open_run(config), config.compute
    with executing(executor, compute) as used:
        settings = used.workers(compute)
        used.report("timing a few batches on one worker")
        measured = used.time_passes(worker_spec(opened), settings)
    return Estimate(
        stages=_stages(opened, measured),
        pass_seconds=measured,
        n_workers=settings.n_workers,
        devices_each=settings.num_gpus or compute.num_cpus,
        unit="GPU" if settings.num_gpus else "core",
    )


def _stages(opened: Run, measured: Mapping[str, PassSeconds]) -> tuple[StageEstimate, ...]:
    stages = [_estimate(stage, opened, measured) for stage in stages_of(opened.config)]
    if opened.config.std and attacks_its_choice(opened.config.search) and not opened.store.exists(SELECTED):
        stages.insert(1, _rounds(opened, measured["mixed"]))
    return tuple(stages)


def _rounds(opened: Run, seconds: PassSeconds) -> StageEstimate:
    """Estimate the refinement rounds of a search that has not chosen yet."""
    config, rounds, n_images = opened.config, opened.config.search.rounds, opened.inputs.n_images
    n_images = min(config.search.first or n_images, n_images)
    passes = attack_passes(round_attacks(config), round_budget(config.evaluate), opened.inputs.n_classes)
    first, later = SHARES_ATTACKED
    betas = 1.5 if config.search.measure else 1.0  # the other betas together attack half as many images
    at_most = n_images * seconds.of(*passes) * betas * (first + later * (rounds - 1))
    which = f"images in the first of at most {rounds} refinement rounds"
    return StageEstimate("search", math.ceil(first * n_images), passes, at_most, which)


def _estimate(stage: Stage, opened: Run, measured: Mapping[str, PassSeconds]) -> StageEstimate:
    try:
        finished = [*stage.finished(opened)]
    except MissingArtifact:  # the search has not chosen a mixed classifier
        finished = []
    passes, left = stage.passes(opened), stage.part(opened).n_images - sum(map(len, finished))
    at_most = left * sum(measured[name].of(*each) for name, each in passes.items())
    return StageEstimate(stage.name, left, passes.get(stage.model_name(opened.config), (0, 0)), at_most)

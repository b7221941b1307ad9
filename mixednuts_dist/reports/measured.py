"""What was measured at other betas: the finished runs beside this one that attacked in the same way."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ..config import RunConfig, parse_config
from ..errors import MixedNutsError
from ..selection.choice import Choice
from ..stages.adoption import siblings
from ..stages.evaluate import evaluate_fingerprint
from ..stages.runs import Run, finished_partitions, reopen_run
from ..stages.search import read_search_result
from ..storage.store import Store
from .intervals import Count, outcome_counts
from .json_form import transform_entry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredPoint:
    """The deployed mixture of one finished run: its parameters, and what the adaptive attack left of it."""

    run_id: str
    criterion: str
    clamp: str
    parameters: Choice
    clean: Count
    robust: Count

    def to_json(self) -> dict[str, Any]:
        """`run`, `criterion`, `clamp`, the parameters, and the two counts."""
        return {
            "run": self.run_id,
            "criterion": self.criterion,
            "clamp": self.clamp,
            **transform_entry(self.parameters),
            "clean": self.clean.to_json(),
            "robust": self.robust.to_json(),
        }


def measured_points(opened: Run) -> tuple[MeasuredPoint, ...]:
    """This run's point and those of its finished siblings, largest beta first.

    Siblings have the same name, stand in the same storage, and share the attack rows to the bit and the settings of the
    adaptive attack, so that their points belong into one picture. Counts come from the files' footers; no row is read.
    """
    points = [point for run in (opened, *_siblings(opened)) if (point := _point(run)) is not None]
    return tuple(sorted(points, key=lambda point: -point.parameters.beta))


def _siblings(opened: Run) -> Iterator[Run]:
    config = opened.config
    for name, store in siblings(config).items():
        try:
            sibling = _reopened(store, config)
        except (MixedNutsError, yaml.YAMLError, KeyError, TypeError) as error:
            logger.info("%s is left out of the report: %s", name, error)
            continue
        same_attack = sibling.attack_fingerprint == opened.attack_fingerprint
        if same_attack and sibling.config.run_id() == name and sibling.config.evaluate == config.evaluate:
            yield sibling


def _reopened(store: Store, config: RunConfig) -> Run:
    """A run by its folder: what it ran is in its `run.yaml`."""
    content = yaml.safe_load(store.read("run.yaml"))["config"]
    return reopen_run(parse_config({**content, "storage": config.storage}, store.address("run.yaml")))


def _point(run: Run) -> MeasuredPoint | None:
    """None where the run is not finished, or its files are not its own."""
    try:
        search = read_search_result(run)
        receipts = list(finished_partitions(run, "evaluate", evaluate_fingerprint(run, search)).values())
    except MixedNutsError as error:
        logger.info("%s is left out of the report: %s", run.config.run_id(), error)
        return None
    if len(receipts) < len(run.partitions):
        return None
    clean, robust = outcome_counts(receipts)
    return MeasuredPoint(
        run_id=run.config.run_id(),
        criterion=search.criterion,
        clamp=search.clamp,
        parameters=search.deployed(),
        clean=clean,
        robust=robust,
    )

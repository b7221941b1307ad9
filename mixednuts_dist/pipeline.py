"""All stages in order; each does only what is not done yet."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from .classifiers.base_classifiers import classifier_checksum
from .config.run_config import RunConfig
from .config.uris import GIVEN
from .distributed.executor import Executor, executing
from .errors import DamagedFile, MissingArtifact, ReadOnlyStorage
from .images.datasets import Dataset
from .reports import report
from .reports.results import RunResults
from .stages import attack, evaluate, search
from .stages.choosing import needed_stage
from .stages.progress import RunProgress
from .stages.runs import Run, open_run, reopen_run
from .stages.stage import stages_of
from .storage.damage import set_aside_if_damaged

logger = logging.getLogger(__name__)

_REPAIRS = 5


def run(
    config: RunConfig,
    *,
    classifiers: Mapping[str, nn.Module] | None = None,
    images: Dataset | None = None,
    executor: Executor | None = None,
    progress: RunProgress | None = None,
    drawn: bool = True,
) -> RunResults:
    """Attack, search, evaluate, run the stages that the configuration asks for, and report; errors as in the stages.

    Args:
        config: from `load_config` or `parse_config`.
        classifiers: modules to use instead of the URIs `std` and `rob`; the caller's modules do not change.
        images: an opened dataset to use instead of `data.uri`.
        executor: that runs all stages; by default the one of `compute.executor`. `debug` runs in this process.
        progress: is called at the beginning and end of each stage and after each partition.
        drawn: whether to draw the figures and the page.

    Without `std` there is neither attack nor search. If a stage finds a damaged file, the file is quarantined and all
    stages run again to replace it. On read-only storage, the results of a finished run are read and nothing is written.
    """
    config, watched = with_objects(config, classifiers or {}, images), progress or RunProgress()
    try:
        opened = open_run(config)
    except ReadOnlyStorage as error:
        try:
            return report.run(config, progress=watched) if drawn else report.collect(reopen_run(config))
        except MissingArtifact:  # there is something to compute
            raise error from None
    with executing(executor, config.compute) as used:
        for _ in range(_REPAIRS):
            try:
                return _complete(opened, used, watched, drawn)
            except DamagedFile as error:
                logger.warning("%s", error)
                folder, _, name = error.address.rpartition("/")
                set_aside_if_damaged(opened.store.at(folder), name)
            except MissingArtifact as error:  # another driver has just quarantined it
                logger.warning("%s", error)
        return _complete(opened, used, watched, drawn)


def with_objects(config: RunConfig, classifiers: Mapping[str, nn.Module], images: Dataset | None) -> RunConfig:
    """The configuration with the caller's objects, which their checksums name in the run."""
    objects: dict[str, Any] = dict(classifiers)
    labels = {role: f"{GIVEN}:{classifier_checksum(model, GIVEN)[:12]}" for role, model in classifiers.items()}
    if images is not None:
        objects["data"], labels["data"] = images, f"{GIVEN}:{images.checksum(len(images))[:12]}"
    return config.with_objects(objects, labels) if objects else config


def _complete(opened: Run, executor: Executor, progress: RunProgress, drawn: bool) -> RunResults:
    asked = stages_of(opened.config)  # before any pass: a stage may refuse its keys
    if opened.config.std is not None:
        attack.complete(opened, executor, progress)
        for stage in asked:
            if stage.name == needed_stage(opened.config.search):
                stage.complete(opened, executor, progress)
        search.complete(opened, executor, progress)
    evaluate.complete(opened, executor, progress)
    every_image = opened.config.evaluate.until is None  # a search learns from a whole evaluation only
    while opened.config.std is not None and every_image and search.learn(opened, executor, progress):
        evaluate.complete(opened, executor, progress)
    evaluate.check(opened, executor, progress)
    for stage in asked:
        if stage.name in opened.config.added_stages():
            stage.complete(opened, executor, progress)
    if not drawn:
        return report.collect(opened)
    executor.report("drawing the tables, the figures and the page")
    return report.run(opened.config, progress=progress)

"""Run all stages in order; each computes only what is missing."""

import logging
from collections.abc import Mapping

from torch import nn

from .classifiers.base_classifiers import classifier_checksum
from .config.run_config import RunConfig
from .config.uris import ClassifierSource, DatasetSource
from .distributed.executor import Executor, executing
from .errors import DamagedFile, MissingArtifact, ReadOnlyStorage
from .images.datasets import Dataset
from .reports import report
from .reports.report import RunReport
from .stages import search
from .stages.evaluate import cross_check
from .stages.progress import RunProgress
from .stages.runs import Run, open_run, reopen_run
from .stages.stage import stages_of

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
) -> RunReport:
    """Attack, search, evaluate, run the optional stages of the configuration, and report; errors as in the stages.

    Args:
        config: from `load_config` or `parse_config`.
        classifiers: modules to use instead of the URIs `std` and `rob`; the caller's modules do not change.
        images: an opened dataset to use instead of `data.uri`.
        executor: computes all stages. By default, it is the executor that `compute.executor` names.
        progress: receives the start and end of each stage and each finished partition.
        drawn: whether to draw the figures and write the HTML page of the report.

    Without `std`, the attack stage and the search are skipped. If a stage finds a damaged file, the file is quarantined
    and all stages run again to replace it. On read-only storage, the results of a finished run are read and nothing is
    written.
    """
    config, watched = with_objects(config, classifiers or {}, images), progress or RunProgress()
    try:
        opened = open_run(config)
    except ReadOnlyStorage as error:
        try:
            return report.run(config, progress=watched) if drawn else report.collect(reopen_run(config))
        except MissingArtifact:  # the run is not finished, so it would have to write
            raise error from None
    for stage in stages_of(opened.config):
        stage.check_inputs(opened.inputs)
    with executing(executor, config.compute) as used:
        for _ in range(_REPAIRS):
            try:
                return _complete(opened, used, watched, drawn)
            except DamagedFile as error:
                logger.warning("%s", error)
                folder, _, name = error.address.rpartition("/")
                opened.store.at(folder).set_aside(name, error.sha256)
            except MissingArtifact as error:  # another driver has just quarantined a file
                logger.warning("%s", error)
        return _complete(opened, used, watched, drawn)


def with_objects(config: RunConfig, classifiers: Mapping[str, nn.Module], images: Dataset | None) -> RunConfig:
    """Return the configuration with the caller's modules and images instead of its URIs; checksums identify them."""
    held = {role: ClassifierSource.holding(model, classifier_checksum(model)) for role, model in classifiers.items()}
    uri = config.data.uri if images is None else DatasetSource.holding(images, images.checksum(len(images)))
    return config.with_changes(data=config.data.with_changes(uri=uri), **held)


def _complete(opened: Run, executor: Executor, progress: RunProgress, drawn: bool) -> RunReport:
    stages = {stage.name: stage for stage in stages_of(opened.config)}
    if opened.config.std is not None:
        stages["attack"].complete(opened, executor, progress)
        search.complete(opened, executor, progress)
    stages["evaluate"].complete(opened, executor, progress)
    if opened.config.std is not None:
        while search.learn(opened, executor, progress):
            stages["evaluate"].complete(opened, executor, progress)
    if check := cross_check(opened.config):
        check.complete(opened, executor, progress)
    for name in opened.config.added_stages():
        if name in stages:
            stages[name].complete(opened, executor, progress)
    if not drawn:
        return report.collect(opened)
    executor.report("drawing the tables, the figures and the page")
    return report.run(opened.config, progress=progress)

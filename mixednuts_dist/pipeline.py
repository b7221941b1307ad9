"""All stages in order; each does only what is not done yet."""

import logging

from .config.run_config import RunConfig
from .distributed.executor import Executor, executing
from .errors import DamagedFile, MissingArtifact, ReadOnlyStorage
from .reports import report
from .reports.results import RunResults
from .stages import attack, evaluate, search
from .stages.choosing import needed_stage
from .stages.progress import Progress, Silent
from .stages.runs import Run, open_run, reopen_run
from .stages.stage import stages_of
from .storage.damage import set_aside_if_damaged

logger = logging.getLogger(__name__)

_REPAIRS = 5


def run(
    config: RunConfig, *, executor: Executor | None = None, progress: Progress | None = None, drawn: bool = True
) -> RunResults:
    """Attack, search, evaluate, stages of their own key, report, on one executor; errors as in the stages.

    Without `drawn` the results come back, and neither figures nor the page are made.

    Without std there is neither attack nor search.

    A file that a stage finds damaged is set aside; then all of them once more fill the gap. Of a finished run on
    storage that takes no files the results are read, and nothing is written.
    """
    watched = progress or Silent()
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
                set_aside_if_damaged(opened.store, error.path)
            except MissingArtifact as error:  # another driver has just set it aside
                logger.warning("%s", error)
        return _complete(opened, used, watched, drawn)


def _complete(opened: Run, executor: Executor, progress: Progress, drawn: bool) -> RunResults:
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

"""Run studies on one configuration: each leaves its files and is printed before the next begins."""

import sys
from collections.abc import Sequence

from rich.console import Console

from ..config import RunConfig
from ..distributed.cluster import RaySession
from ..errors import InvalidInputError
from ..stages.progress import Progress
from .bench import Bench
from .files import study_files
from .outcome import Outcome
from .registry import find_studies
from .study import Study
from .terminal import print_study

_LOG_WIDTH = 160  # of tables in a file


def run(
    config: RunConfig,
    name: str,
    *,
    full: bool = False,
    robs: Sequence[str] = (),
    session: RaySession | None = None,
    progress: Progress | None = None,
    console: Console | None = None,
) -> dict[str, Outcome]:
    """The study of that name in the catalogue, or all of them, printed on the console; every outcome by name.

    Raises:
        InvalidInputError: after all others are done, naming the studies that this run's rows do not allow. Errors of
            the attacks and of the storage are raised at once.
    """
    bench = Bench(config, session=session, progress=progress, full=full, robs=robs)
    console = console or result_console()
    done, refused = {}, []
    for study in find_studies(name):
        try:
            done[study.name] = study.run(bench)
        except InvalidInputError as error:
            refused.append(f"{study.name}: {error}")
            continue
        print_study(study, done[study.name], config, _write(study, done[study.name], bench), console)
    if refused:
        raise InvalidInputError("this run does not allow these studies: " + "; ".join(refused))
    return done


def result_console() -> Console:
    """Standard output as it is now, with lines that are long enough for the tables where it is a file."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _LOG_WIDTH, highlight=False)


def _write(study: Study, outcome: Outcome, bench: Bench) -> str:
    """Store the study's files below the run; returns their folder's address."""
    folder = f"studies/{study.name}"
    for file_name, content in study_files(study, outcome, bench.config).items():
        bench.run.store.write(f"{folder}/{file_name}", content)
    return bench.run.store.address(folder)

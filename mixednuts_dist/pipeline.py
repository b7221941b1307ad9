"""All stages in order; each does only what is not done yet."""

from .config import RunConfig
from .distributed.cluster import RaySession
from .reports import report
from .reports.results import RunResults
from .stages import attack, evaluate, search
from .stages.progress import Progress, Silent
from .stages.runs import open_run


def run(config: RunConfig, *, session: RaySession | None = None, progress: Progress | None = None) -> RunResults:
    """Attack, search, evaluate, report, on one Ray session; errors as in the stages."""
    opened, watched = open_run(config), progress or Silent()
    with RaySession() as own:
        used = session or own
        attack.complete(opened, used, watched)
        search.complete(opened, used, watched)
        evaluate.complete(opened, used, watched)
    return report.run(config, progress=watched)

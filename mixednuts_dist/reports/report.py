"""The report stage: from the stored rows to counts, tables, figures and the page."""

from ..config import RunConfig
from ..data.tables import read_attack_records, read_evaluate_records
from ..stages.evaluate import CACHED, evaluate_fingerprint
from ..stages.progress import Progress, Silent
from ..stages.runs import Run, reopen_run, require_complete, stage_clock, stage_seconds
from ..stages.search import read_search_result
from .page import render_page
from .results import RunResults, gather_results


def run(config: RunConfig, *, progress: Progress | None = None) -> RunResults:
    """Write the report of a finished run and return its results.

    Raises:
        MissingArtifact: where a stage has not finished.
        FingerprintMismatch: where stored rows are not this run's.
    """
    opened = reopen_run(config)
    results = collect(opened)
    with stage_clock(opened.store, "report"):
        for name, content in render_page(results).items():
            opened.store.write(f"report/{name}", content)
    (progress or Silent()).stage_finished("report", opened.store.address("report/index.html"))
    return results


def collect(opened: Run) -> RunResults:
    """The results of a finished run, read from its files alone; errors as in `run`."""
    config, store = opened.config, opened.store
    require_complete(opened, "attack", opened.attack_fingerprint)
    search = read_search_result(opened)
    fingerprint = evaluate_fingerprint(opened, search)
    require_complete(opened, "evaluate", fingerprint)
    seconds = {stage: value for stage, value in stage_seconds(store).items() if stage != "report"}
    return gather_results(
        run_id=config.run_id(),
        name=config.name,
        dataset=config.data.uri,
        std=config.std,
        rob=config.rob,
        threat=config.threat.threat_model(),
        attack=read_attack_records(store, opened.partitions, opened.attack_fingerprint),
        search=search,
        evaluate=read_evaluate_records(store, opened.partitions, fingerprint, [CACHED, *config.evaluate.attacks]),
        seconds=seconds,
    )

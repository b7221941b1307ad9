"""The report stage: from the stored rows to counts, tables, figures and the page."""

from dataclasses import replace

from ..attacks.red_flags import FLAGS, findings
from ..config import RunConfig
from ..errors import DatasetError
from ..stages.evaluate import CACHED, evaluate_fingerprint
from ..stages.progress import Progress, Silent
from ..stages.runs import Run, reopen_run, require_complete, stage_clock, stage_seconds
from ..stages.search import read_candidates, read_search_result
from ..storage.records import AttackRecords, EvaluateRecords
from ..storage.tables import FLAG, read_attack_records, read_columns, read_evaluate_records
from .cost import stage_costs
from .measured import measured_points
from .page import render_page, render_single_page
from .results import RunResults, gather_results
from .single import SingleResults, collect_single
from .worst_images import WorstImage, worst_images


def run(config: RunConfig, *, progress: Progress | None = None) -> RunResults | SingleResults:
    """Write the report of a finished run and return its results.

    Raises:
        MissingArtifact: where a stage has not finished.
        FingerprintMismatch: where stored rows are not this run's.
    """
    opened = reopen_run(config)
    results = collect_single(opened) if config.std is None else collect(opened)
    with stage_clock(opened.store, "report"):
        files = render_single_page(results) if isinstance(results, SingleResults) else render_page(results)
        for name, content in files.items():
            opened.store.write(f"report/{name}", content)
    (progress or Silent()).stage_finished("report", opened.store.address("report/index.html"))
    return results


def collect(opened: Run) -> RunResults:
    """The results of a finished run, read from its files alone; errors as in `run`."""
    config, store = opened.config, opened.store
    receipts = {"attack": require_complete(opened, "attack", opened.attack_fingerprint)}
    search = read_search_result(opened)
    fingerprint = evaluate_fingerprint(opened, search)
    receipts["evaluate"] = require_complete(opened, "evaluate", fingerprint)
    seconds = {stage: value for stage, value in stage_seconds(store).items() if stage != "report"}
    attack = read_attack_records(store, opened.partitions, opened.attack_fingerprint)
    evaluate = read_evaluate_records(store, opened.partitions, fingerprint, [CACHED, *config.evaluate.attacks])
    results = gather_results(
        run_id=config.run_id(),
        name=config.name,
        dataset=config.data.uri,
        std=config.required_std,
        rob=config.rob,
        threat=config.threat.threat_model(),
        attack=attack,
        search=search,
        evaluate=evaluate,
        seconds=seconds,
    )
    worst, missing = _pictures(opened, attack, evaluate, fingerprint)
    columns = [f"{FLAG}{flag}" for flag in FLAGS]
    flags = read_columns(store, "evaluate", opened.partitions, fingerprint, columns)
    raised = {flag: flags[f"{FLAG}{flag}"] for flag in FLAGS}
    return replace(
        results,
        notes=(*results.notes, *findings(raised, opened.inputs.n_classes, "the mixture"), *missing),
        measured=measured_points(opened),
        candidates=tuple(read_candidates(opened, config.search.beta)),
        costs=stage_costs({stage: list(found.values()) for stage, found in receipts.items()}, seconds),
        worst=worst,
    )


def _pictures(
    opened: Run, attack: AttackRecords, evaluate: EvaluateRecords, fingerprint: str
) -> tuple[tuple[WorstImage, ...], tuple[str, ...]]:
    """The images to look at; none, and a note, on a machine that the data set is not on."""
    try:
        return worst_images(opened, attack, evaluate, fingerprint), ()
    except DatasetError as error:
        return (), (f"No images are shown: {error}",)

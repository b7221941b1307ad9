"""The page of a run that goes on: what its files say so far. The report takes its place once all stages are done."""

from markupsafe import Markup

from ..errors import MissingArtifact
from ..stages.runs import RESULTS, Run, finished_partitions, read_search_result
from ..stages.stage import stages_of
from .counts import outcome_counts
from .table import Cell, Table
from .tables import search_table

_PAGE = "report/index.html"
_AGAIN_SECONDS = 20
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse}th,td{padding:.2rem .8rem .2rem 0;text-align:left;white-space:nowrap}"
    ".scroll{overflow-x:auto}"
)


def write_interim(opened: Run) -> None:
    """Write the page of what is there, unless a report is."""
    if not opened.store.exists(RESULTS):
        opened.store.write(_PAGE, interim_page(opened).encode())


def interim_page(opened: Run) -> str:
    """Partitions and running accuracies of every stage with their intervals, and the search's choices."""
    try:
        search = read_search_result(opened) if opened.config.std is not None else None
    except MissingArtifact:
        search = None
    rows: list[list[Cell]] = []
    for stage in stages_of(opened.config):
        if search is None and stage.model_name(opened.config) != "rob":
            continue
        done = finished_partitions(opened, stage.name, stage.fingerprint(opened))
        pieces = f"{len(done)}/{len(opened.partitions)}"
        rows.append([stage.name, pieces, stage.model_name(opened.config), *outcome_counts(list(done.values()))])
    stages = Table(("stage", "partitions", "of", "clean", "robust"), rows)
    found = "" if search is None else _section("What the search predicts", search_table(search))
    return Markup(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="refresh" content="{}"><title>{}: so far</title><style>{}</style></head><body><main>'
        "<h1>{}</h1><p>This run goes on. The page shows what was stored when the last stage ended; the report "
        "takes its place.</p>{}{}</main></body></html>\n"
    ).format(
        _AGAIN_SECONDS, opened.config.name, Markup(_STYLE), opened.config.run_id(),
        _section("Stages so far", stages), found,
    )  # fmt: skip


def _section(title: str, table: Table) -> Markup:
    return Markup('<h2>{}</h2><div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>').format(
        title, title, table.as_html()
    )

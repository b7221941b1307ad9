"""The page of a run that goes on: what its files say so far. The report takes its place once all stages are done."""

from ..errors import MissingArtifact
from ..stages.runs import RESULTS, Run, finished_partitions, read_search_result
from ..stages.stage import stages_of
from .counts import outcome_counts
from .table import Cell, Table
from .tables import search_table
from .templates import rendered

_PAGE = "report/index.html"
_AGAIN_SECONDS = 20


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
    tables = {"Stages so far": Table(("stage", "partitions", "of", "clean", "robust"), rows)}
    if search is not None:
        tables["What the search predicts"] = search_table(search)
    return rendered("reports", "interim.html", config=opened.config, tables=tables, again_seconds=_AGAIN_SECONDS)

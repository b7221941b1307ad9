"""All runs under a storage as one table, from the summaries of their partitions alone."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config.run_config import RUNS
from ..errors import MissingArtifact, MixedNutsError
from ..stages.runs import RESULTS, SELECTED, Run, finished_partitions, read_search_result, stored_run
from ..stages.stage import Stage, stage_of, stages_of
from ..storage.outages import FIRST_ANSWER_SECONDS
from ..storage.records import Receipt
from ..storage.run_file import RUN
from ..storage.store import Store
from .counts import Count, device_hours, outcome_counts
from .table import Cell, Table

COLUMNS = ("run", "data", "threat", "clean", "robust", "beta", "GPU-hours", "core-hours", "finished", "state")


@dataclass(frozen=True)
class Entry:
    """One run, as its files describe it."""

    run: str
    data: str
    threat: str
    clean: Count | None  # for the evaluated classifier; None before its evaluation has begun
    robust: Count | None
    beta: float | None
    gpu_hours: float  # all stages together
    core_hours: float
    finished: float | None  # when its last partition was written, in seconds since 1970
    state: str  # "reported", "evaluate 3/9", or why the run is unreadable

    def cells(self) -> list[Cell]:
        """In the order of `COLUMNS`."""
        when = None if self.finished is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.finished))
        return [self.run, self.data, self.threat, self.clean, self.robust, self.beta, round(self.gpu_hours, 3),
                round(self.core_hours, 3), when, self.state]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The fields under their names."""
        counts = {name: None if count is None else count.to_json() for name, count in
                  (("clean", self.clean), ("robust", self.robust))}  # fmt: skip
        return {**vars(self), **counts}


def entries(storage: str, *, trusted: bool = False) -> list[Entry]:
    """Return one entry per folder with a `run.yaml`, the latest first; an unreadable run has the reason as its state.

    Args:
        trusted: as in `stored_run`.

    Raises:
        MissingArtifact: if there is no run.
    """
    root = Store(storage, FIRST_ANSWER_SECONDS)
    runs = [(name, run) for name in root.names("") for run in root.names(f"{name}/{RUNS}")]
    found = [entry for name, run in runs if (entry := _entry(root.child(f"{name}/{RUNS}/{run}"), run, trusted))]
    if not found:
        raise MissingArtifact(f"there is no run under {storage}. Run: mixednuts run CONFIG --set storage={storage}")
    return sorted(found, key=lambda entry: -(entry.finished or 0.0))


def summaries_by_stage(run: Run, *, searched: bool) -> list[tuple[Stage, list[Receipt]]]:
    """Return the stages of a run in order, each with the summaries of its finished partitions.

    Args:
        searched: whether the search has chosen a mixed classifier; the stages that attack it have no rows before.
    """
    return [
        (stage, [*finished_partitions(stage.part(run), stage.name, stage.fingerprint(run)).values()])
        if searched or stage.model_name(run.config) == "rob"
        else (stage, [])
        for stage in stages_of(run.config)
    ]


def table(found: Sequence[Entry]) -> Table:
    """Return the entries as a table."""
    return Table(COLUMNS, [entry.cells() for entry in found], printed=["run", "data", "clean", "robust", "beta"])


def _entry(store: Store, name: str, trusted: bool) -> Entry | None:
    """Return None for a folder that does not hold a run."""
    try:
        return _entry_of(stored_run(store, trusted=trusted), name) if store.exists(RUN) else None
    except MixedNutsError as error:
        return Entry(name, "", "", None, None, None, 0.0, 0.0, None, f"unreadable: {error}")


def _entry_of(run: Run, name: str) -> Entry:
    config, state = run.config, "not begun"
    searched = run.store.exists(SELECTED)
    receipts = {stage.name: found for stage, found in summaries_by_stage(run, searched=searched)}
    for stage, found in receipts.items():
        if found:
            state = f"{stage} {len(found)}/{len(stage_of(config, stage).part(run).partitions)}"
    if run.store.exists(RESULTS):
        state = "reported"
    every = [receipt for found in receipts.values() for receipt in found]
    gpu, core = device_hours(every)
    clean, robust = outcome_counts(receipts["evaluate"]) if receipts.get("evaluate") else (None, None)
    return Entry(
        run=name,
        data=config.written(config.data.uri),
        threat=str(config.threat.threat_model()),
        clean=clean,
        robust=robust,
        beta=read_search_result(run).deployed_beta if config.std is not None and searched else None,
        gpu_hours=gpu,
        core_hours=core,
        finished=max((receipt.finished for receipt in every), default=None),
        state=state,
    )

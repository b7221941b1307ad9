"""Show the progress of a run, or list the runs of a storage (`status`).

The command reads only stored files, so it works on any machine that can read the storage. Speed and time left follow
from the times in the files' footers. Runs send no heartbeats, but the age of the last finished partition shows whether
a stage is running.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
from rich.console import Console

from ..config.run_config import RUN, RUNS, RunConfig
from ..errors import MissingArtifact, MixedNutsError
from ..reports.counts import Count, device_hours, held_text, outcome_counts, seconds_text
from ..reports.table import Cell, Table, print_table
from ..stages.driver_notes import current_stage
from ..stages.runs import RESULTS, Run, finished_partitions, reopen_run, run_store, stored_run
from ..stages.search_result import SELECTED, read_search_result
from ..stages.stage import Stage, stages_of
from ..storage.outages import FIRST_ANSWER_SECONDS
from ..storage.records import PartitionSummary
from ..storage.store import Store
from .options import (
    Invocation,
    command,
    is_folder,
    json_option,
    open_folder,
    run_folder,
    set_option,
    trust_option,
)

WINDOW_SECONDS = 1800.0  # the speed counts partitions that were finished in it
_COLUMNS = ("data", "threat", "clean", "robust", "beta", "gpu_hours", "core_hours", "finished", "state")
_WATCH_SECONDS = 5.0
_WIDE, _NARROW = 140, ("run", "clean", "robust", "beta", "state")  # width that fits all columns; those that fit in 80


@command(
    "status mine.yaml --watch",
    "status runs/mine/runs/mine-0af3c2d1 --verify",
    "status s3://bucket/runs",
    interrupted="Interrupted. The run continues.",
)
@click.argument("source", metavar="RUN|CONFIG|STORAGE")
@set_option
@json_option
@trust_option
@click.option("--watch", is_flag=True, help="Refresh until the run ends or Ctrl-C.")
@click.option("--verify", is_flag=True, help="Read every file and verify its checksum.")
@click.option("--repair", is_flag=True, help="With --verify: quarantine damaged files, so that `run` recreates them.")
def status(
    source: str, overrides: tuple[str, ...], *, as_json: bool, trust_code: bool, watch: bool, verify: bool, repair: bool
) -> None:
    """Show the progress of a run, or list the runs of a storage."""
    if repair and not verify:
        raise click.UsageError("--repair needs --verify")
    if sum((watch, as_json, verify)) > 1:
        raise click.UsageError("--watch, --json and --verify cannot be combined; to poll, repeat `status --json`")
    given = Invocation(source, overrides, trust=trust_code)
    if is_folder(source) and not open_folder(source).exists(RUN):
        _print_runs(source, as_json, trust_code)
    elif verify:
        _verify(given, repair)
    elif watch:
        watch_status(given.config, Console())
    elif as_json:
        click.echo(json.dumps(asdict(run_status(given.config)), indent=2))
    else:
        print_status(run_status(given.config), Console())


def _print_runs(storage: str, as_json: bool, trust: bool) -> None:
    found, console = storage_runs(storage, trusted=trust), Console()
    if as_json:
        click.echo(json.dumps({"format": "mixednuts-runs/1", "runs": found}, indent=2, default=Count.to_json))
        return
    for row in found:
        row["finished"] = row["finished"] and time.strftime("%Y-%m-%d %H:%M", time.gmtime(row["finished"]))
    table = Table.of(found)
    print_table(table if console.width >= _WIDE else table.only(_NARROW), console)


def storage_runs(storage: str, *, trusted: bool = False) -> list[dict[str, Any]]:
    """Describe every run under a storage by its files, the latest first; an unreadable run has the reason as its state.

    Args:
        trusted: as in `stored_run`.

    Raises:
        MissingArtifact: if there is no run.
    """
    root = Store(storage, FIRST_ANSWER_SECONDS)
    runs = [(name, run) for name in root.names("") for run in root.names(f"{name}/{RUNS}")]
    stores = {run: root.child(f"{name}/{RUNS}/{run}") for name, run in runs}
    found = [row for run, store in stores.items() if (row := _run_row(store, run, trusted))]
    if not found:
        raise MissingArtifact(f"there is no run under {storage}. Run: mixednuts run CONFIG --set storage={storage}")
    return sorted(found, key=lambda row: -(row["finished"] or 0.0))


def _run_row(store: Store, name: str, trusted: bool) -> dict[str, Any] | None:
    """Return the row of a run, or None for a folder that does not hold a run."""
    row: dict[str, Any] = {"run": name, **dict.fromkeys(_COLUMNS)}
    try:
        return {**row, **_run_cells(stored_run(store, trusted=trusted))} if store.exists(RUN) else None
    except MixedNutsError as error:
        return {**row, "state": f"unreadable: {error}"}


def _run_cells(run: Run) -> dict[str, Any]:
    config, searched = run.config, run.store.exists(SELECTED)
    stages = [(stage, found) for stage, found in summaries_by_stage(run, searched=searched) if found]
    every = [summary for _, found in stages for summary in found]
    begun = [f"{stage.name} {len(found)}/{len(stage.part(run).partitions)}" for stage, found in stages]
    evaluated = next((found for stage, found in stages if stage.name == "evaluate"), None)
    clean, robust = outcome_counts(evaluated) if evaluated else (None, None)
    core, gpu = device_hours(every)
    return {
        "data": config.data.uri.written,
        "threat": str(config.threat.threat_model()),
        "clean": clean,
        "robust": robust,
        "beta": read_search_result(run).deployed_beta if config.std is not None and searched else None,
        "gpu_hours": gpu,
        "core_hours": core,
        "finished": max((summary.finished for summary in every), default=None),
        "state": "reported" if run.store.exists(RESULTS) else ["started", *begun][-1],
    }


def summaries_by_stage(run: Run, *, searched: bool) -> list[tuple[Stage, list[PartitionSummary]]]:
    """Return the stages of a run in order, each with the summaries of its finished partitions.

    Args:
        searched: whether the search has chosen a mixed classifier. Before that, stages that attack it have no rows.
    """
    return [
        (stage, [*stage.finished(run).values()] if searched or stage.model_name(run.config) == "rob" else [])
        for stage in stages_of(run.config)
    ]


def _verify(given: Invocation, repair: bool) -> None:
    from ..storage.damage import verify

    is_run = is_folder(given.source)
    store = run_folder(given.source) if is_run else run_store(given.config, FIRST_ANSWER_SECONDS)
    above, _, runs = store.uri.rpartition("/")[0].rpartition("/")
    store = store.at(above) if runs == RUNS else store  # with the rows that runs of one name share
    bad, n_files = verify(store)
    if not n_files:
        raise MissingArtifact(f"{store.uri} holds no run. Run: {given.typed('run')}")
    for damage in bad.values():
        click.echo(f"{damage.address}: {damage}")
    if bad and repair:
        for path, damage in bad.items():
            if kept := store.set_aside(path, damage.sha256):
                click.echo(f"kept as {store.address(kept)}")
        click.echo(f"Next: {given.typed('run')}")
    elif bad:
        click.echo(f"{len(bad)} of {n_files} files are damaged. Next: {given.typed('status --verify --repair')}")
        raise SystemExit(1)
    else:
        click.echo(f"All {n_files} files of {store.uri} were read; no checksum differs")


@dataclass(frozen=True)
class StageStatus:
    """The status of one stage: progress, accuracy so far, speed and cost. Unknown values are None."""

    stage: str
    classifier: str  # "mixed" or "rob", to which the accuracy belongs
    partitions_done: int
    partitions: int
    images: int  # in the finished partitions
    clean_correct: int
    robust: int
    worker_seconds: float
    images_left: int
    images_per_second: float | None  # all workers together, in the last half hour
    seconds_left: float | None
    last_finished_seconds_ago: float | None
    gpu_hours: float
    gpu_hours_left: float
    core_hours: float  # for workers without an accelerator
    core_hours_left: float


@dataclass(frozen=True)
class RunStatus:
    """The status of a run."""

    run_id: str
    uri: str
    stages: tuple[StageStatus, ...] = ()
    searched: bool | None = None  # None without `std`
    reported: bool = False
    started: bool = False  # until a driver has tried the images and the classifiers
    failed: tuple[str, ...] = ()  # addresses of the logs of quarantined partitions
    notes: tuple[str, ...] = ()  # caveats about the evaluation's settings


def run_status(config: RunConfig) -> RunStatus:
    """Read the progress of a run; a run that has not started has no stages.

    Raises:
        StoreError: if the storage does not answer or its bucket does not exist.
    """
    try:
        opened = reopen_run(config, FIRST_ANSWER_SECONDS)
    except MissingArtifact:
        store = run_store(config, FIRST_ANSWER_SECONDS)
        return RunStatus(config.run_id(), store.uri, searched=None if config.std is None else False)
    searched = opened.store.exists(SELECTED)
    stages = [
        stage_status(stage.name, stage.model_name(config), stage.part(opened), summaries, time.time())
        for stage, summaries in summaries_by_stage(opened, searched=searched)
    ]
    part, now = opened.searched, None if searched else current_stage(opened.store)
    if now is not None and now[0].startswith("search/"):  # the driver works on a refinement round
        summaries = [*finished_partitions(part, *now).values()]
        stages.append(stage_status(now[0], "mixed", part, summaries, time.time()))
    return RunStatus(
        run_id=config.run_id(),
        uri=opened.store.uri,
        stages=tuple(stages),
        searched=None if config.std is None else searched,
        reported=opened.store.exists(RESULTS),
        started=True,
        failed=tuple(opened.store.address(f"errors/{name}") for name in opened.store.names("errors")),
        notes=tuple(config.evaluate.notes),
    )


def print_status(status: RunStatus, console: Console) -> None:
    """Print a table of the stages, their pace and the logs of failed partitions."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(f"run {status.run_id}  {status.uri}")
    if not status.started:
        say(
            "The run has not started. A submitted run starts once its driver has tried the classifiers; "
            "`ray job logs` shows the log of its job."
        )
        return
    columns = ("stage", "partitions", "of", "clean", "robust", "worker time")
    print_table(Table(columns, [_cells(stage) for stage in status.stages]), console)
    for stage in status.stages:
        say(f"{stage.stage:<8} {_pace_text(stage)}")
    for name, done in (("search", status.searched), ("report", status.reported)):
        if done is not None:
            say(f"{name}   {'done' if done else 'not done'}")
    for line in (*status.notes, *(f"failed   {log}" for log in status.failed)):
        say(line)


def watch_status(config: RunConfig, console: Console) -> None:
    """Show the status of a run on a cleared terminal every few seconds until its report exists."""
    while True:
        found = run_status(config)
        console.clear()
        print_status(found, console)
        if found.reported:
            return
        time.sleep(_WATCH_SECONDS)


def _cells(stage: StageStatus) -> list[Cell]:
    time_held = seconds_text(stage.worker_seconds) if stage.images else None
    counts = (Count(n, stage.images) for n in (stage.clean_correct, stage.robust))
    return [stage.stage, f"{stage.partitions_done}/{stage.partitions}", stage.classifier, *counts, time_held]


def _pace_text(stage: StageStatus) -> str:
    """Write the age of the last result, the speed, the time left and the cost in one line."""
    parts = []
    if stage.images_left and stage.last_finished_seconds_ago is not None:
        parts.append(f"last images finished {seconds_text(stage.last_finished_seconds_ago)} ago")
    if stage.images_left and stage.images_per_second and stage.seconds_left is not None:
        parts.append(f"{stage.images_per_second:.2g} images/s, about {seconds_text(stage.seconds_left)} to go")
    gpu, core = (stage.gpu_hours, stage.gpu_hours_left), (stage.core_hours, stage.core_hours_left)
    for device, (spent, left) in {"GPU": gpu, "core": core}.items():
        if spent:
            parts.append(held_text(spent, device) + (f", about {held_text(left, device)} to go" if left else ""))
    return " · ".join(parts) if parts else "nothing finished yet"


def stage_status(
    name: str, classifier: str, part: Run, summaries: Sequence[PartitionSummary], now: float
) -> StageStatus:
    """Return the status of a stage that computes `part` of a run, at the time `now` (seconds since 1970)."""
    clean, robust = outcome_counts(summaries)
    core, gpu = device_hours(summaries)
    images_left = part.n_images - clean.total
    each_left = images_left / clean.total if clean.total else 0.0
    finished = max((summary.finished for summary in summaries), default=0.0)
    speed = _speed(summaries, max(now, finished))  # a worker's clock may be ahead of this machine's
    return StageStatus(
        stage=name,
        classifier=classifier,
        partitions_done=len(summaries),
        partitions=len(part.partitions),
        images=clean.total,
        clean_correct=clean.correct,
        robust=robust.correct,
        worker_seconds=round(sum(summary.seconds for summary in summaries), 3),
        images_left=images_left,
        images_per_second=speed,
        seconds_left=images_left / speed if speed else None,
        last_finished_seconds_ago=max(0.0, now - finished) if finished else None,
        gpu_hours=gpu,
        gpu_hours_left=gpu * each_left,
        core_hours=core,
        core_hours_left=core * each_left,
    )


def _speed(summaries: Sequence[PartitionSummary], now: float) -> float | None:
    """Return the images of recently finished partitions per second since the first of them began."""
    lately = [summary for summary in summaries if summary.finished > now - WINDOW_SECONDS]
    if not lately:
        return None
    begun = min(summary.finished - summary.seconds for summary in lately)
    return sum(summary.n_images for summary in lately) / max(now - begun, 1e-9)

"""The commands that compute: `run`, its single stages, and `report`."""

import tempfile
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from ..config.run_config import RunConfig
from ..errors import MissingArtifact
from .options import (
    MESSAGES,
    RESUMES,
    Invocation,
    command,
    json_option,
    log_options,
    on_config,
    on_config_or_run,
    print_result,
    worker_options,
)

_PAGE = "report/index.html"


@command(
    "run jobs/configs/digits.yaml",
    "run mine.yaml --set storage=s3://bucket/prefix --set compute.num_workers=8",
    "run mine.yaml --local --only certify",
    interrupted=RESUMES,
)
@on_config_or_run
@worker_options
@log_options
@json_option
@click.option("--only", metavar="STAGE", help="Run only this stage. `mixednuts schema --names` lists the stages.")
def run(given: Invocation, as_json: bool, only: str | None) -> None:
    """Run all stages, skipping those already finished."""
    if only is not None:
        if as_json:
            raise click.UsageError("--json prints the results of the whole run; drop --only")
        _search(given) if only == "search" else _stage(given, only)
        return
    given.require_inputs()
    from .. import pipeline

    print_result(given.on_workers(partial(pipeline.run, given.config)), as_json)
    if given.config.std is not None:
        from ..deployment.loading import loading_line

        MESSAGES.print(loading_line(given.config, f"{given.config.storage}/{given.config.place()}"))


@command("attack mine.yaml --local", "attack mine.yaml --address 10.0.0.7:6379", interrupted=RESUMES)
@on_config
@worker_options
@log_options
def attack(given: Invocation) -> None:
    """Attack the robust classifier with MMAA and the standard one with APGD."""
    _stage(given, "attack")


@command("search mine.yaml --betas 0.9,0.95,0.99", interrupted=RESUMES)
@on_config
@worker_options
@log_options
@click.option("--betas", metavar="LIST", help="Search for these target retentions (search.betas).")
def search(given: Invocation, betas: str | None) -> None:
    """Search s, p, c, and alpha for every beta, then refine the choice.

    The search reads stored logits. Refinement rounds (search.rounds) attack the mixed classifier with the selected
    parameters, and search again.
    """
    _search(given.setting("search.betas", betas and f"[{betas}]"))


@command(
    "evaluate mine.yaml --local --set preset=fast",
    "evaluate mine.yaml --adv-images x_adv.pt",
    interrupted=RESUMES,
)
@on_config
@worker_options
@log_options
@click.option("--adv-images", metavar="FILE", help="Verify adversarial images from FILE instead.")
def evaluate(given: Invocation, adv_images: str | None) -> None:
    """Attack the mixed classifier with adaptive AutoAttack.

    If CONFIG has no `std`, the command attacks `rob` with AutoAttack. With --adv-images, the command
    counts the images of FILE (.pt, .npy, .npz, .parquet) that the classifiers misclassify in float32.
    """
    _stage(given.setting("adv_images.file", adv_images), "evaluate" if adv_images is None else "adv_images")


@command("report mine.yaml --json", "report runs/mine/runs/mine-0af3c2d1 --open")
@on_config_or_run
@json_option
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
def report(given: Invocation, as_json: bool, opened: bool) -> None:
    """Write the tables, figures, and HTML page of a finished run."""
    config = given.config
    from ..reports import report as stage
    from .terminal import TerminalProgress

    with TerminalProgress(MESSAGES) as progress:
        progress.doing("drawing the tables, the figures and the page")
        results = stage.run(config, progress=progress)
    print_result(results, as_json)
    if opened:
        _open_page(config)


def _open_page(config: RunConfig) -> None:
    """Open the page in the browser and print its path; a page in a bucket is copied to a temporary file."""
    from ..stages.runs import run_store

    store = run_store(config)
    path = Path(store.address(_PAGE))
    if "://" in store.uri:
        path = Path(tempfile.mkdtemp(prefix="mixednuts-")) / f"{config.run_id()}.html"
        path.write_bytes(store.read(_PAGE))
    MESSAGES.print(str(path))
    with suppress(webbrowser.Error):  # without a browser the path is enough
        webbrowser.open(path.absolute().as_uri())


def _stage(given: Invocation, name: str) -> None:
    """Run one stage and print its tables."""
    given.require_inputs()
    from ..stages.stage import stage_of

    stage = stage_of(given.config, name)
    opened = given.on_workers(partial(stage.run, given.config))
    from ..reports.report import stage_tables
    from ..reports.table import print_table

    try:
        tables = stage_tables(opened, [stage])
    except MissingArtifact as missing:  # the stage is done, but its table needs the result of the search
        MESSAGES.print(f"no table yet: {missing}")
        return
    for title, table in tables.items():
        print_table(table, Console(), title)
    if name in given.config.added_stages():
        MESSAGES.print(f"Next, run all stages. The report will have this table: {given.typed('run')}")


def _search(given: Invocation) -> None:
    given.require_inputs()
    from ..stages import search as stage

    result = given.on_workers(partial(stage.run, given.config))
    from ..reports.table import print_table
    from ..reports.tables import search_table

    print_table(search_table(result), Console(), f"criterion {result.criterion}")
    MESSAGES.print(f"run {given.config.run_id()} in {given.config.storage}. Next: {given.typed('run')}")

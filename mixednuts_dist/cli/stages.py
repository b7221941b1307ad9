"""The stages as commands."""

import json
from functools import partial

import click
from rich.console import Console

from ..config import load_config
from .options import (
    address_option,
    config_argument,
    examples,
    json_option,
    on_ray,
    prepared,
    reported,
    set_option,
    show,
    verbose_option,
)


@click.command(
    epilog=examples(
        "run jobs/configs/digits.yaml", "run mine.yaml --set storage=s3://bucket/prefix --set compute.num_workers=8"
    )
)
@config_argument
@set_option
@address_option
@json_option
@verbose_option
def run(config: str, overrides: tuple[str, ...], address: str | None, as_json: bool, verbose: bool) -> None:
    """All stages in order; what is done is skipped."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides, console)
        from .. import pipeline

        results = on_ray(console, address, partial(pipeline.run, loaded))
        show(results, as_json)
        if loaded.std is not None:
            from ..deployment.loading import loading_line

            console.print(loading_line(f"{loaded.storage}/{loaded.run_id()}"), highlight=False, soft_wrap=True)


@click.command(epilog=examples("attack mine.yaml"))
@config_argument
@set_option
@address_option
@verbose_option
def attack(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool) -> None:
    """The first stage: the minimum-margin attack on the robust classifier."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides, console)
        from ..stages import attack as stage

        on_ray(console, address, partial(stage.run, loaded))


@click.command(epilog=examples("search mine.yaml --beta 0.97"))
@config_argument
@set_option
@address_option
@verbose_option
@click.option("--beta", type=float, help="Deploy this beta; short for --set search.beta=BETA.")
def search(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool, beta: float | None) -> None:
    """s, p, c and alpha for every beta, from the cached logits."""
    with reported(verbose) as console:
        if beta is not None:
            overrides = (*overrides, f"search.beta={beta}")
        loaded = prepared(config, overrides, console)
        from ..reports.table import print_table
        from ..reports.tables import search_table
        from ..stages import search as stage

        result = on_ray(console, address, partial(stage.run, loaded))
        print_table(search_table(result), Console(), f"criterion {result.criterion}")
        console.print(f"run {loaded.run_id()} in {loaded.storage}", highlight=False, markup=False, soft_wrap=True)


@click.command(epilog=examples("evaluate mine.yaml --address 10.0.0.7:6379"))
@config_argument
@set_option
@address_option
@verbose_option
def evaluate(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool) -> None:
    """The adaptive AutoAttack on the mixed classifier."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides, console)
        from ..stages import evaluate as stage

        on_ray(console, address, partial(stage.run, loaded))


@click.command(epilog=examples("report mine.yaml --json"))
@config_argument
@set_option
@json_option
@verbose_option
def report(config: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Tables, figures and the page of a finished run."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides, console)
        from ..reports import report as stage
        from .terminal import TerminalProgress

        with TerminalProgress(console) as progress:
            results = stage.run(loaded, progress=progress)
        show(results, as_json)


@click.command(epilog=examples("status mine.yaml", "status mine.yaml --set storage=s3://bucket/prefix --json"))
@config_argument
@set_option
@json_option
@verbose_option
def status(config: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """What is done, what is missing, what failed; reads the storage only."""
    with reported(verbose):
        loaded = load_config(config, overrides)
        from .status import print_status, run_status

        found = run_status(loaded)
        if as_json:
            click.echo(json.dumps(found.to_json(), indent=2))
        else:
            print_status(found, Console())

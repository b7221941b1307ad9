"""The command `mixednuts`. Heavy libraries are imported only once the configuration is known to be sound."""

import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
from rich.console import Console

from .config import RunConfig, load_config
from .data.uris import check_uris
from .errors import MixedNutsError

_config_argument = click.argument("config", type=click.Path(dir_okay=False))
_set_option = click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override the file.")
_address_option = click.option("--address", help="Ray cluster to use; RAY_ADDRESS or a local one by default.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the final table as JSON on stdout.")
_verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show the log.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mixednuts-dist")
def main() -> None:
    """MixedNUTS on Ray: attack, search, evaluate, report."""


def prepared(config: str, overrides: tuple[str, ...]) -> RunConfig:
    """Read and check the configuration in a fraction of a second; errors as in `config` and `data.uris`."""
    loaded = load_config(config, overrides)
    check_uris(data=loaded.data.uri, std=loaded.std, rob=loaded.rob)
    return loaded


@contextmanager
def reported(verbose: bool) -> Iterator[Console]:
    """A console on stderr; our errors become one red line and exit status 1, Ctrl-C a hint and 130."""
    console = Console(stderr=True)
    _configure_logging(verbose)
    try:
        yield console
    except MixedNutsError as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("interrupted: what is written is kept; the same command goes on from there", highlight=False)
        sys.exit(130)


def _configure_logging(verbose: bool) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not verbose:
        warnings.simplefilter("ignore")
        logging.getLogger("ray").setLevel(logging.ERROR)


@main.command()
@_config_argument
@_set_option
@_address_option
@_json_option
@_verbose_option
def run(config: str, overrides: tuple[str, ...], address: str | None, as_json: bool, verbose: bool) -> None:
    """All stages in order; what is done is skipped."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides)
        from . import pipeline

        results = _on_ray(console, address, partial(pipeline.run, loaded))
        _show(results, as_json)


@main.command()
@_config_argument
@_set_option
@_address_option
@_verbose_option
def attack(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool) -> None:
    """The minimum-margin attack on the robust classifier."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides)
        from .stages import attack as stage

        _on_ray(console, address, partial(stage.run, loaded))


@main.command()
@_config_argument
@_set_option
@_address_option
@_verbose_option
@click.option("--beta", type=float, help="Deploy this beta; short for --set search.beta=BETA.")
def search(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool, beta: float | None) -> None:
    """s, p, c and alpha for every beta, from the cached logits."""
    with reported(verbose) as console:
        if beta is not None:
            overrides = (*overrides, f"search.beta={beta}")
        loaded = prepared(config, overrides)
        from .reports.search_table import search_table
        from .stages import search as stage

        result = _on_ray(console, address, partial(stage.run, loaded))
        Console().print(search_table(result))


@main.command()
@_config_argument
@_set_option
@_address_option
@_verbose_option
def evaluate(config: str, overrides: tuple[str, ...], address: str | None, verbose: bool) -> None:
    """The adaptive AutoAttack on the mixed classifier."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides)
        from .stages import evaluate as stage

        _on_ray(console, address, partial(stage.run, loaded))


@main.command()
@_config_argument
@_set_option
@_json_option
@_verbose_option
def report(config: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Tables, figures and the page of a finished run."""
    with reported(verbose) as console:
        loaded = prepared(config, overrides)
        from .reports import report as stage
        from .reports.terminal import TerminalProgress

        with TerminalProgress(console) as progress:
            results = stage.run(loaded, progress=progress)
        _show(results, as_json)


@main.command()
@_config_argument
@_set_option
@_json_option
@_verbose_option
def status(config: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """What is done, what is missing, what failed; reads the storage only."""
    with reported(verbose):
        loaded = load_config(config, overrides)
        from .reports.status import print_status, run_status

        found = run_status(loaded)
        if as_json:
            click.echo(json.dumps(found.to_json(), indent=2))
        else:
            print_status(found, Console())


@main.command()
@click.argument("name", type=click.Choice(["search"]))
def benchmark(name: str) -> None:
    """Our code beside a plain one in the same process, as ratios, in JSON."""
    module = importlib.import_module(f".benchmarks.{name}", __package__)
    click.echo(json.dumps(module.run(), indent=2))


@main.command()
def schema() -> None:
    """The JSON schema of the configuration file."""
    click.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


def _on_ray(console: Console, address: str | None, work: Callable[..., Any]) -> Any:
    """`work` with a progress display and a Ray session that starts when it is first needed."""
    from .distributed.cluster import RaySession
    from .reports.terminal import TerminalProgress

    with RaySession(address) as session, TerminalProgress(console) as progress:
        return work(session=session, progress=progress)


def _show(results: Any, as_json: bool) -> None:
    from .reports.tables import print_results

    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2, allow_nan=False))
    else:
        print_results(results, Console())

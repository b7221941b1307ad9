"""What the commands share: their options, the checked configuration, errors in words, and a Ray session."""

import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click
from rich.console import Console
from rich.highlighter import NullHighlighter

from ..config import RunConfig, load_config
from ..errors import MixedNutsError
from ..logs import log_json
from ..uris import check_uris

logger = logging.getLogger(__name__)

config_argument = click.argument("config", type=click.Path(dir_okay=False))
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Another value for a key of CONFIG, e.g. search.beta=0.97.",
)
address_option = click.option("--address", help="Ray cluster to use; RAY_ADDRESS or a local one by default.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the final table as JSON on stdout.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show the log.")


def examples(*commands: str) -> str:
    """The end of a command's help: what CONFIG is, and commands to copy."""
    about = "CONFIG is a YAML file; `mixednuts init` writes one to start from.\n\n" if _takes_config(commands) else ""
    return about + "\b\nExamples:\n" + "\n".join(f"  mixednuts {command}" for command in commands)


def _takes_config(commands: tuple[str, ...]) -> bool:
    return any(".yaml" in command for command in commands)


def prepared(config: str, overrides: tuple[str, ...], console: Console) -> RunConfig:
    """Read and check the configuration in a fraction of a second, then say which run it is: the rest loads for seconds.

    Raises:
        MixedNutsError: as in `config` and `uris`.
    """
    loaded = load_config(config, overrides)
    check_uris(data=loaded.data.uri, std=loaded.std, rob=loaded.rob)
    told = f"run {loaded.run_id()} in {loaded.storage}: loading PyTorch and Ray"
    if _as_json_lines():
        logger.info(told, extra={"run": loaded.run_id()})
    else:
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return loaded


@contextmanager
def reported(verbose: bool) -> Iterator[Console]:
    """A console on stderr; our errors become one red line and exit status 1, Ctrl-C a hint and 130, SIGTERM 143."""
    console = Console(stderr=True)
    _configure_logging(verbose, console)
    before = _on_sigterm(_terminated)
    try:
        yield console
    except MixedNutsError as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt as error:
        console.print("interrupted: what is written is kept; the same command goes on from there", highlight=False)
        sys.exit(143 if isinstance(error, Terminated) else 130)
    finally:
        _on_sigterm(before)


class Terminated(KeyboardInterrupt):
    """SIGTERM, as Slurm and spot machines send it: ends the command in the same way as Ctrl-C."""


def _terminated(*_: object) -> None:
    raise Terminated


def _on_sigterm(handler: Any) -> Any:
    """Put the handler in its place, where that is possible; returns the one before."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler)


def _configure_logging(verbose: bool, console: Console) -> None:
    if _as_json_lines():
        log_json()
        return
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[_handler(console)])
    if not verbose:
        warnings.simplefilter("ignore")
        logging.getLogger("ray").setLevel(logging.ERROR)


def _handler(console: Console) -> logging.Handler:
    """Log lines through the console that draws the progress bar, so that neither cuts the other in two."""
    from rich.logging import RichHandler

    return RichHandler(console=console, show_path=False, markup=False, highlighter=NullHighlighter())


def _as_json_lines() -> bool:
    return click.get_current_context().find_root().params.get("log_format") == "json"


def on_ray(console: Console, address: str | None, work: Callable[..., Any]) -> Any:
    """`work` with a progress display and a Ray session that starts when it is first needed.

    Ray prints of dying nodes on stdout, where only a command's result belongs; in here that goes to stderr.
    """
    from ..distributed.cluster import RaySession
    from .terminal import LogProgress, TerminalProgress

    shown = LogProgress if _as_json_lines() else TerminalProgress
    with redirect_stdout(sys.stderr), RaySession(address) as session, shown(console) as progress:
        return work(session=session, progress=progress)


def show(results: Any, as_json: bool) -> None:
    from ..reports.tables import print_results

    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2, allow_nan=False))
    else:
        print_results(results, Console())

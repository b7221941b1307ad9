"""What the commands share: their options, the checked configuration, errors in words, and an executor."""

import functools
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.highlighter import NullHighlighter

from ..config.run_config import RunConfig, load_config
from ..config.uris import check_uris, needs_trust
from ..errors import ConfigError, MissingArtifact, MixedNutsError, log_json, printable

if TYPE_CHECKING:
    from ..storage.store import Store

logger = logging.getLogger(__name__)

_STANDS = "{} is a run, whose configuration stands; leave --set and --beta out, or give CONFIG"
_AT_ONCE = 1.0  # seconds between signals of one cause
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ALARM = getattr(signal, "SIGALRM", None)  # Windows has none: an interrupt is raised once there

config_argument = click.argument("config", type=click.Path(dir_okay=False))
run_or_config_argument = click.argument("config", metavar="CONFIG|RUN")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Another value for a key of CONFIG, e.g. search.beta=0.97.",
)
address_option = click.option("--address", help="Ray cluster to use; RAY_ADDRESS or a local one by default.")
local_option = click.option(
    "--local", is_flag=True, help="Worker processes on this machine, no Ray; short for --set compute.executor=local."
)
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Use the Python code, services and files that RUN names. Read them first.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show the log.")
deployed_beta_option = click.option("--beta", type=float, help="Deploy this beta; short for --set search.beta=BETA.")


def examples(*commands: str) -> str:
    """The end of a command's help: what CONFIG is, and commands to copy."""
    about = "CONFIG is a YAML file; `mixednuts init` writes one to start from. " if _names(".yaml", commands) else ""
    about += "RUN is the folder or URI of a run, <storage>/<run id>.\n\n" if _names("runs/", commands) else "\n\n"
    return about + "\b\nExamples:\n" + "\n".join(f"  mixednuts {command}" for command in commands)


def _names(what: str, commands: tuple[str, ...]) -> bool:
    return any(what in command for command in commands)


def typed(command: str, config: str, overrides: tuple[str, ...] = (), *, local: bool = False) -> str:
    """A command as one types it: with the configuration, `--set`s and `--local` that this one was given.

    >>> typed("run", "my runs.yaml", ("data.n=8",), local=True)
    "mixednuts run 'my runs.yaml' --set data.n=8 --local"
    """
    sets = (part for override in overrides for part in ("--set", override))
    return shlex.join(["mixednuts", *command.split(), config, *sets, *["--local"] * local])


@dataclass(frozen=True)
class Invocation:
    """A command with its checked configuration, and how the two were typed."""

    config: RunConfig
    console: Console
    address: str | None = None
    local: bool = False
    source: str = ""
    overrides: tuple[str, ...] = ()

    def typed(self, command: str, *more: str) -> str:
        """Another command on the same configuration, with `more` values of keys."""
        return typed(command, self.source, (*self.overrides, *more), local=self.local)

    def on_ray(self, work: Callable[..., Any], prints: Console | None = None) -> Any:
        """`work` with a progress display and an executor that starts when it is first needed.

        Ray prints of dying nodes on stdout, and classifiers what they like, also below Python; in here that goes to
        stderr, since only a command's result belongs on stdout: what `work` itself `prints`, as it comes.
        """
        from ..distributed.executor import make_executor
        from .terminal import LogProgress, TerminalProgress

        shown = LogProgress if _as_json_lines() else TerminalProgress
        name = "local" if self.local else self.config.compute.executor
        with (
            _stdout_on_stderr() as stdout,
            make_executor(name, self.address) as executor,
            shown(self.console) as progress,
        ):
            if prints is not None:
                prints.file = stdout
            executor.report = progress.doing
            progress.doing("looking at the images, trying the classifiers on a few of them")
            return work(executor=executor, progress=progress)


@contextmanager
def _stdout_on_stderr() -> Iterator[IO[str]]:
    """Of Python and of what it calls: the file descriptor too. Yields what still leads to stdout."""
    if sys.stdout is None:  # it is closed, and the number may be another file's
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            yield nowhere
        return
    python = sys.stdout
    python.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding=python.encoding, closefd=False) as below, redirect_stdout(sys.stderr):
            yield below if python is sys.__stdout__ else python
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def run_command(
    *shown: str,
    ray: bool = True,
    local: bool = True,
    as_json: bool = False,
    beta: bool = False,
    looks: bool = False,
    short_for: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], click.Command]:
    """A command on a CONFIG: the function gets an `Invocation` and the options of its own.

    The configuration is checked in a fraction of a second; the function imports what takes seconds.

    Args:
        shown: examples for its help.
        ray, local, as_json, beta: whether it takes --address, --local, --json and --beta.
        looks: whether it does without the classifiers and images that a run names, so that it needs no trust.
        short_for: further options that are short for a key: the option's name -> the key.
    """
    taken = {address_option: ray, local_option: ray and local, json_option: as_json, deployed_beta_option: beta}

    def make(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def command(
            config: str, overrides: tuple[str, ...], verbose: bool, trust: bool, address: str | None = None,
            local: bool = False, beta: float | None = None, **options: Any,
        ) -> None:  # fmt: skip
            if local and address:
                raise click.UsageError("--local uses no Ray cluster; leave --address out")
            written = {"search.beta": beta, **{key: options.pop(name) for name, key in (short_for or {}).items()}}
            overrides += tuple(f"{key}={value}" for key, value in written.items() if value is not None)
            with reported(verbose) as console:
                loaded = prepared(config, overrides, console, trust=trust, looks=looks)
                function(Invocation(loaded, console, address, local, config, overrides), **options)

        for option in (verbose_option, trust_option, *reversed([option for option, wanted in taken.items() if wanted])):
            command = option(command)
        for name, key in (short_for or {}).items():
            value = name.upper()
            command = click.option(f"--{name}", metavar=value, help=f"Short for --set {key}={value}.")(command)
        return click.command(epilog=examples(*shown))(run_or_config_argument(set_option(command)))

    return make


def prepared(
    config: str, overrides: tuple[str, ...], console: Console, *, trust: bool = False, looks: bool = False
) -> RunConfig:
    """Read and check the configuration, then say at once which run it is, since PyTorch loads for seconds.

    Args:
        trust: whether what a run names beyond its folder may be used.
        looks: whether the command does without the classifiers and images.

    Raises:
        MixedNutsError: as in `config` and `uris`; ConfigError for a run that is not trusted and needs to be.
    """
    loaded = config_of(config, overrides, trust=trust)
    if not loaded.trusted and not looks and (outside := loaded.outside()):
        raise ConfigError(needs_trust(config, outside))
    check_uris(data=loaded.data.uri, std=loaded.std, rob=loaded.rob)
    line = f"run {loaded.run_id()} in {loaded.storage}: loading PyTorch"
    if _as_json_lines():
        logger.info(line, extra={"run": loaded.run_id()})
    else:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return loaded


def config_of(source: str, overrides: tuple[str, ...] = (), *, trust: bool = False) -> RunConfig:
    """The configuration of CONFIG, a YAML file, or of RUN, the folder or URI of a run, wherever that lies now.

    Args:
        trust: whether the code and files that a run names may be used; CONFIG is the user's own.

    Raises:
        MixedNutsError: as in `config`, and where RUN holds no run, or one whose folder has another name.
    """
    if "://" not in source and not os.path.isdir(source):  # noqa: PTH112, of a name that is too long it says False
        return load_config(source, overrides)
    if overrides:
        raise ConfigError(_STANDS.format(source))
    from ..stages.runs import stored_run
    from ..storage.outages import FIRST_ANSWER_SECONDS
    from ..storage.store import Store

    store = Store(source, FIRST_ANSWER_SECONDS)
    opened = stored_run(store, trusted=trust)
    found, (storage, _, name) = opened.config, store.uri.rstrip("/").rpartition("/")
    if name != found.run_id():
        raise ConfigError(
            f"{source}: the run in it is {found.run_id()}, and its folder's name is another: it was renamed. Rename "
            "it, or give the configuration file"
        )
    return found.with_changes(storage=storage or "/")


def store_of(source: str, overrides: tuple[str, ...] = ()) -> "Store":
    """Where the files of a run lie, for commands that take them as they are: CONFIG's run, or RUN itself."""
    from ..stages.runs import run_store
    from ..storage.outages import FIRST_ANSWER_SECONDS
    from ..storage.store import Store

    if "://" not in source and not os.path.isdir(source):  # noqa: PTH112, of a name that is too long it says False
        return run_store(load_config(source, overrides), FIRST_ANSWER_SECONDS)
    if overrides:
        raise ConfigError(_STANDS.format(source))
    store = Store(source, FIRST_ANSWER_SECONDS)
    if not store.exists("run.yaml"):
        raise MissingArtifact(f"{store.uri} holds no run: there is no run.yaml in it. Give a run's folder or URI")
    return store


GOES_ON = "interrupted: what is written is kept; the same command goes on from there"


@contextmanager
def reported(verbose: bool, interrupted: str = GOES_ON) -> Iterator[Console]:
    """A console on stderr; our errors become one red line and exit status 1, a signal a hint and 128 + its number."""
    console = Console(stderr=True)
    _configure_logging(verbose, console)
    received: list[int] = []
    with _signals_kept(received):
        try:
            yield console
            if received:  # and swallowed, just before the end
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt) as error:
            # In the middle of an import or inside of Ray an interrupt may come out as an error of any kind.
            if received or isinstance(error, KeyboardInterrupt):
                with suppress(OSError):  # the terminal may be closed
                    console.print(interrupted, highlight=False, soft_wrap=True)
                sys.exit(128 + (received[0] if received else signal.SIGINT))
            if not isinstance(error, MixedNutsError):
                raise
            console.print(f"[red]{type(error).__name__}[/red]: ", end="")
            console.print(printable(str(error)), markup=False, highlight=False, soft_wrap=True)
            sys.exit(1)


@contextmanager
def _signals_kept(received: list[int]) -> Iterator[None]:
    """In here SIGINT (Ctrl-C), SIGTERM (Slurm, spot machines) and SIGHUP (a closed terminal) raise KeyboardInterrupt.

    Of signals that come at once only the first one does: `uv run` passes on what the whole group gets as well. It is
    raised again each second as long as it is not on its way out: code that interrupts fall into may swallow them, such
    as a destructor, a callback or an import that answers every error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    last, show_unraisable = -math.inf, sys.unraisablehook

    def show_errors(what: "sys.UnraisableHookArgs") -> None:
        if not received or issubclass(what.exc_type, Exception):  # others are interrupts
            show_unraisable(what)

    def interrupt(number: int, _: object) -> None:
        nonlocal last
        received.append(number)
        if (now := time.monotonic()) - last > _AT_ONCE:
            last = now
            if _ALARM:
                handlers.setdefault(_ALARM, signal.signal(_ALARM, interrupt_again))
                signal.setitimer(signal.ITIMER_REAL, _AT_ONCE, _AT_ONCE)
            raise KeyboardInterrupt

    def interrupt_again(_: int, __: object) -> None:
        if not _is_ending():
            raise KeyboardInterrupt

    # Under nohup SIGHUP is ignored, and stays so.
    kept = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers: dict[Any, Any] = {number: signal.signal(number, interrupt) for number in kept}
    sys.unraisablehook = show_errors
    try:
        yield
    finally:
        sys.unraisablehook = show_unraisable
        if _ALARM and _ALARM in handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(_ALARM, handlers.pop(_ALARM) or signal.SIG_DFL)
        for number, handler in handlers.items():  # a further signal does not kill the command while it ends
            signal.signal(number, signal.SIG_IGN if received else handler or signal.SIG_DFL)


def _is_ending() -> bool:
    """Whether a KeyboardInterrupt is being handled right now, or an error that it has become."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _configure_logging(verbose: bool, console: Console) -> None:
    """Log lines through the console that draws the progress bar, so that neither cuts the other in two."""
    if _as_json_lines():
        log_json()
        return
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False, markup=False, highlighter=NullHighlighter())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])
    if not verbose:
        warnings.simplefilter("ignore")
        logging.getLogger("ray").setLevel(logging.ERROR)


def _as_json_lines() -> bool:
    return click.get_current_context().find_root().params.get("log_format") == "json"


def print_result(results: Any, as_json: bool) -> None:
    """A run's results as the table, or as one JSON object."""
    from ..reports.tables import print_results

    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2, allow_nan=False))
    else:
        print_results(results, Console())

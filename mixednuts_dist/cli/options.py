"""Options, error messages and signal handling of all commands, and the context in which a command was called."""

import difflib
import functools
import json
import logging
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
from ..config.uris import needs_trust
from ..errors import ConfigError, MissingArtifact, MixedNutsError, log_json, printable, redacted

if TYPE_CHECKING:
    from ..storage.store import Store

logger = logging.getLogger(__name__)

INTERRUPTED = "Interrupted."
RESUMES = f"{INTERRUPTED} Finished partitions are stored; run the same command to resume."
# Signals within this many seconds count as one, because `uv run` passes on a Ctrl-C that this process receives too.
_AT_ONCE = 2.0
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ABOUT = {
    "CONFIG": "CONFIG is a YAML file; `mixednuts init` writes one to start from.",
    "RUN": "RUN is the folder or URI of a run, <storage>/<name>/runs/<run id>.",
    "STORAGE": "STORAGE is a folder or URI that holds runs.",
}


def _remember(context: click.Context, option: click.Parameter, value: Any) -> None:
    context.meta[f"mixednuts.{option.name}"] = value


config_argument = click.argument("config", type=click.Path(dir_okay=False))
run_argument = click.argument("run")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a key of CONFIG. Repeatable."
)
address_option = click.option(
    "--address", help="Connect to this Ray cluster. Default: RAY_ADDRESS, or a local Ray instance."
)
local_option = click.option("--local", is_flag=True, help="Use worker processes on this machine, without Ray.")
trust_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Use the Python code, services, and files that RUN references. Review them first.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_verbose = click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=_remember, help="Show the log.")
log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    expose_value=False,
    callback=_remember,
    help="Write progress and log as text or as JSON lines.",
)


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-v` and `--log-format`, which `reported` reads."""
    return _verbose(log_format_option(command))


class Command(click.Command):
    """A command whose help explains its arguments and shows examples.

    Args:
        examples: command lines without `mixednuts`; a test parses each of them.
    """

    def __init__(self, *arguments: Any, examples: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        names = " ".join(
            str(each.metavar or each.name).upper() for each in self.params if each.param_type_name != "option"
        )
        write_examples(formatter, [text for name, text in _ABOUT.items() if name in names], self.examples)


def write_examples(formatter: click.HelpFormatter, about: list[str], commands: tuple[str, ...]) -> None:
    """Write the end of a help text, which explains the arguments and lists commands to copy."""
    formatter.write_paragraph()
    if about:
        formatter.write_text(" ".join(about))
        formatter.write_paragraph()
    formatter.write("Examples:\n")
    for command in commands:
        formatter.write(f"  mixednuts {command}\n")


def command(*examples: str, name: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Return `click.command` with examples."""
    return click.command(name, cls=Command, examples=examples)


def typed(
    command: str, source: str, overrides: tuple[str, ...] = (), *, local: bool = False, address: str | None = None,
    trust: bool = False,
) -> str:  # fmt: skip
    """Return the command line of a command, with the options of the current one.

    >>> typed("run", "my runs.yaml", ("data.n=8",), local=True)
    "mixednuts run 'my runs.yaml' --set data.n=8 --local"
    """
    sets = (part for override in overrides for part in ("--set", override))
    to = ("--address", address) if address else ()
    return shlex.join(
        ["mixednuts", *command.split(), source, *sets, *["--local"] * local, *to, *["--trust-code"] * trust]
    )


def messages() -> Console:
    """Return the console for all output except results; it writes one line per message to stderr, without markup."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Invocation:
    """The configuration of a command, and the arguments with which the command was called."""

    config: RunConfig
    console: Console
    address: str | None = None
    local: bool = False
    trust: bool = False
    source: str = ""
    overrides: tuple[str, ...] = ()

    def typed(self, command: str) -> str:
        """Return the command line of another command on the same configuration."""
        return typed(command, self.source, self.overrides, local=self.local, address=self.address, trust=self.trust)

    def require_inputs(self) -> None:
        """Check that everything that the configuration names exists, then print the run id.

        The run id is printed before PyTorch is loaded, which takes seconds.

        Raises:
            ConfigError: for an untrusted run that references code or files elsewhere.
            MixedNutsError: for missing files, as in `uris`.
        """
        config = self.config
        if not config.trusted and (outside := config.outside()):
            raise ConfigError(needs_trust(self.source, outside))
        config.check_sources()
        line = f"run {config.run_id()} in {config.storage}: loading PyTorch"
        if log_is_json():
            logger.info(line, extra={"run": config.run_id()})
        else:
            self.console.print(line)

    def on_workers(self, work: Callable[..., Any], prints: Console | None = None) -> Any:
        """Call `work` with a progress display and an executor that starts when it is first needed.

        Ray and classifiers print to stdout, partly from native code. During `work`, this output goes to stderr, because
        only the result of a command belongs on stdout. `prints` is a console for results, which `work` uses: it still
        writes to stdout.
        """
        from ..distributed.executor import make_executor
        from .terminal import LogProgress, TerminalProgress

        shown = LogProgress if log_is_json() else TerminalProgress
        with (
            _stdout_on_stderr() as stdout,
            make_executor(self.config.compute.executor, self.address) as executor,
            shown(self.console) as progress,
        ):
            if prints is not None:
                prints.file = stdout
            executor.report = progress.doing
            progress.doing("inspecting the images and trying the classifiers on a few of them")
            return work(executor=executor, progress=progress)


@contextmanager
def _stdout_on_stderr() -> Iterator[IO[str]]:
    """Redirect Python's stdout and file descriptor 1 to stderr, and yield a file that still writes to stdout."""
    if sys.stdout is None:  # stdout is closed, and descriptor 1 may belong to another file
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
    *examples: str,
    runs: bool = False,
    workers: bool = True,
    logs: bool = True,
    as_json: bool = False,
    interrupted: str = RESUMES,
    before: Callable[[Any], Any] | None = None,
    sets: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that turns a function into a command on CONFIG.

    The function receives an `Invocation` and its other options. The configuration is checked first, which takes a
    fraction of a second. Libraries that take seconds to load are imported inside the function.

    Args:
        examples: command lines for the help.
        runs: whether the command also accepts RUN, and --trust-code.
        workers: whether the command accepts --address and --local.
        logs: whether the command accepts -v and --log-format.
        as_json: whether the command accepts --json.
        interrupted: the message after a signal.
        before: an argument before CONFIG.
        sets: options that set a key of the configuration, option -> key.
    """

    def make(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(
            config: str, overrides: tuple[str, ...], trust_code: bool = False, address: str | None = None,
            local: bool = False, **options: Any,
        ) -> None:  # fmt: skip
            if local and address:
                raise click.UsageError("--local does not use a Ray cluster; drop --address")
            with reported(interrupted) as console:
                if not runs and is_run(config):
                    raise ConfigError(f"{config} is a run, not a configuration file. Run: mixednuts run {config}")
                given = ((key, options[option]) for option, key in (sets or {}).items())
                overrides = (*overrides, *(f"{key}={value}" for key, value in given if value is not None))
                loaded = config_of(config, overrides, trust=trust_code, local=local)
                function(Invocation(loaded, console, address, local, trust_code, config, overrides), **options)

        added: list[Callable[[Any], Any]] = [
            *([trust_option] if runs else []), *([log_options] if logs else []), *([json_option] if as_json else []),
            *([address_option, local_option] if workers else []), set_option,
            click.argument("config", metavar="CONFIG|RUN" if runs else "CONFIG"), *([before] if before else []),
        ]  # fmt: skip
        decorated: Any = run
        for option in added:
            decorated = option(decorated)
        return command(*examples)(decorated)

    return make


def config_of(source: str, overrides: tuple[str, ...] = (), *, trust: bool = False, local: bool = False) -> RunConfig:
    """Load the configuration of CONFIG, a YAML file, or of RUN, the folder or URI of a run.

    Args:
        trust: whether the code and files that RUN references may be used; those of CONFIG may always be.
        local: whether the command uses worker processes instead of Ray.

    Raises:
        MixedNutsError: as in `config`, and if RUN holds no run or its folder was renamed.
    """
    if not is_run(source):
        return load_config(source, (*overrides, *["compute.executor=local"] * local))
    if overrides:
        raise ConfigError(
            f"{source}: the configuration of a run cannot be changed. Drop {' and '.join(overrides)}, or pass a "
            "configuration file"
        )
    from ..stages.runs import stored_run

    opened = stored_run(run_folder(source), trusted=trust)
    found, uri = opened.config, opened.store.uri.rstrip("/")
    place = f"/{found.place()}"
    if not uri.endswith(place):
        raise ConfigError(
            f"{source} contains run {found.run_id()}, but its address does not end in {place}. Move it there, or pass "
            "the configuration file"
        )
    compute = {"compute": found.compute.with_changes(executor="local")} if local else {}
    return found.with_changes(storage=uri.removesuffix(place) or "/", **compute)


def is_run(source: str, *, or_storage: bool = False) -> bool | None:
    """Return whether `source` is RUN (a folder or URI) and not CONFIG (a file); None for a storage of runs.

    Args:
        or_storage: whether a folder or URI without a run counts as a storage.

    Raises:
        MissingArtifact: if no such file or folder exists.
    """
    if "://" in source or os.path.isdir(source):  # noqa: PTH112, os.path.isdir returns False for a name that is too long
        if not or_storage or _store(source).exists("run.yaml"):
            return True
        return None
    if not os.path.isfile(source) and not source.endswith((".yaml", ".yml")):  # noqa: PTH113
        raise MissingArtifact(no_run(source))
    return False


def _store(uri: str) -> "Store":
    from ..storage.outages import FIRST_ANSWER_SECONDS
    from ..storage.store import Store

    return Store(uri, FIRST_ANSWER_SECONDS)


def no_run(source: str) -> str:
    """Return the error message for a `source` that is neither a run nor a configuration file."""
    folder, _, name = source.rstrip("/").rpartition("/")
    with suppress(OSError):
        if close := difflib.get_close_matches(name, os.listdir(folder or "."), n=1):  # noqa: PTH208
            near = f"{folder}/{close[0]}" if folder else close[0]
            return f"{source} is neither a run nor a configuration file. Did you mean {near}?"
    return (
        f"{source} is neither a run nor a configuration file. Pass a YAML file, or the folder or URI of a run, "
        "<storage>/<name>/runs/<run id>"
    )


def run_folder(source: str) -> "Store":
    """Open the folder or URI of a run.

    Raises:
        MissingArtifact: if it holds no run.
    """
    store = _store(source)
    if not store.exists("run.yaml"):
        raise MissingArtifact(no_run(source))
    return store


def rows_of(source: str, overrides: tuple[str, ...] = ()) -> "Store":
    """Open the store that a run shares with all runs of the same name; `source` is RUN or CONFIG."""
    from ..config.run_config import RUNS
    from ..stages.runs import run_store
    from ..storage.outages import FIRST_ANSWER_SECONDS

    store = run_folder(source) if is_run(source) else run_store(load_config(source, overrides), FIRST_ANSWER_SECONDS)
    above, _, runs = store.uri.rpartition("/")[0].rpartition("/")
    return store.at(above) if runs == RUNS else store


@contextmanager
def reported(interrupted: str = INTERRUPTED) -> Iterator[Console]:
    """Yield the console for messages; turn errors, without passwords, and signals into one line and an exit status.

    An error of this package exits with status 1, a signal with 128 plus its number.
    """
    console = messages()
    _configure_logging(console)
    received: list[int] = []
    with _interruptible(received):
        try:
            yield console
            if received:  # the KeyboardInterrupt may be lost, for example in a destructor, which swallows exceptions
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt) as error:
            # In the middle of an import or inside Ray an interrupt may become an error of any kind.
            if received or isinstance(error, KeyboardInterrupt):
                with suppress(OSError):  # the terminal may be closed
                    console.print(interrupted)
                sys.exit(128 + (received[0] if received else signal.SIGINT))
            if not isinstance(error, MixedNutsError):
                raise
            console.print(f"{type(error).__name__}: ", style="red", end="")
            console.print(redacted(printable(str(error))))
            sys.exit(1)


@contextmanager
def _interruptible(received: list[int]) -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP raise KeyboardInterrupt, and the next one end the process.

    Signals within two seconds of the first count as one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = 0.0

    def interrupt(number: int, _: object) -> None:
        nonlocal first
        received.append(number)
        if len(received) == 1:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > _AT_ONCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # A signal that is ignored stays ignored, for example SIGHUP under nohup.
    listened = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, interrupt) for number in listened}
    try:
        yield
    finally:
        for number, handler in handlers.items():  # a late signal does not kill a command that is ending
            signal.signal(number, signal.SIG_IGN if received else handler or signal.SIG_DFL)


def _configure_logging(console: Console) -> None:
    """Write log lines through the console that draws the progress bar, so that they do not overwrite each other.

    Without a terminal each record is one line that begins with the time.
    """
    if log_is_json():
        log_json()
        return
    from rich.logging import RichHandler

    from .terminal import TIME_FORMAT

    verbose = _log_option("verbose")
    level = logging.INFO if verbose else logging.WARNING
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False, highlighter=NullHighlighter())
        logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)-8s %(message)s", datefmt=TIME_FORMAT)
    if not verbose:
        warnings.simplefilter("ignore")
        logging.getLogger("ray").setLevel(logging.ERROR)


def _log_option(name: str) -> Any:
    context = click.get_current_context(silent=True)
    return context.meta.get(f"mixednuts.{name}") if context else None


def log_is_json() -> bool:
    """Return whether the command was called with `--log-format json`."""
    return bool(_log_option("log_format") == "json")


def print_result(results: Any, as_json: bool) -> None:
    """Print a run's results as the table or as one JSON object."""
    from ..reports.tables import print_results

    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2, allow_nan=False))
    else:
        print_results(results, Console())

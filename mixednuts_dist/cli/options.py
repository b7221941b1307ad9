"""Options, error messages and signal handling of all commands, and the context in which a command was called."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.highlighter import NullHighlighter

from ..config.register import did_you_mean
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


set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a key of CONFIG. Repeatable."
)
local_option = click.option("--local", is_flag=True, help="Use worker processes on this machine, without Ray.")
trust_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Use the Python code, services, and files that RUN references. Review them first.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    expose_value=False,
    callback=_remember,
    help="Write progress and log as text or as JSON lines.",
)
_address_option = click.option(
    "--address", help="Connect to this Ray cluster. Default: RAY_ADDRESS, or a local Ray instance."
)
_verbose_option = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, callback=_remember, help="Show the log."
)


def worker_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --address and --local to a command on CONFIG."""
    return _address_option(local_option(function))


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add -v and --log-format to a command."""
    return _verbose_option(log_format_option(function))


class Command(click.Command):
    """A command that reports errors and signals in one line, and whose help explains its arguments.

    Args:
        examples: command lines without `mixednuts`; a test parses each of them.
        interrupted: the message after a signal.
    """

    def __init__(
        self, *arguments: Any, examples: tuple[str, ...] = (), interrupted: str = INTERRUPTED, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.examples, self.interrupted = examples, interrupted
        takes = [each for each in self.params if isinstance(each, click.Argument)]
        names = " ".join(str(each.metavar or each.name).upper() for each in takes)
        about = " ".join(text for name, text in _ABOUT.items() if name in names)
        self.epilog = f"{about}\n\n{examples_text(examples)}"

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with reported(self.interrupted):
            return super().invoke(ctx)


def examples_text(commands: tuple[str, ...]) -> str:
    """Return the end of a help text, which lists commands to copy."""
    return "\n".join(["\b", "Examples:", *(f"  mixednuts {command}" for command in commands)])


def command(*examples: str, interrupted: str = INTERRUPTED) -> Callable[[Callable[..., Any]], click.Command]:
    """Return `click.command` with examples and the message after a signal."""
    return click.command(cls=Command, examples=examples, interrupted=interrupted)


# The console for all output except results; it writes one line per message to stderr, without markup.
MESSAGES = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Invocation:
    """The arguments with which a command was called, and the configuration that they name."""

    source: str
    overrides: tuple[str, ...] = ()
    address: str | None = None
    local: bool = False
    trust: bool = False

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration of CONFIG, a YAML file, or of RUN, the folder or URI of a run.

        Raises:
            MixedNutsError: as in `config`, and if RUN holds no run or its folder was renamed.
        """
        if not is_folder(self.source):
            return load_config(self.source, (*self.overrides, *["compute.executor=local"] * self.local))
        if self.overrides:
            raise ConfigError(
                f"{self.source}: the configuration of a run cannot be changed. Drop {' and '.join(self.overrides)}, or "
                "pass a configuration file"
            )
        from ..stages.runs import stored_run

        opened = stored_run(run_folder(self.source), trusted=self.trust)
        found, uri = opened.config, opened.store.uri.rstrip("/")
        place = f"/{found.place()}"
        if not uri.endswith(place):
            raise ConfigError(
                f"{self.source} contains run {found.run_id()}, but its address does not end in {place}. Move it there, "
                "or pass the configuration file"
            )
        compute = {"compute": found.compute.with_changes(executor="local")} if self.local else {}
        return found.with_changes(storage=uri.removesuffix(place) or "/", **compute)

    def setting(self, key: str, value: str | None) -> "Invocation":
        """Return the invocation with a key of the configuration set, unless `value` is None."""
        return self if value is None else replace(self, overrides=(*self.overrides, f"{key}={value}"))

    def typed(self, command: str) -> str:
        """Return the command line of another command on the same configuration.

        >>> Invocation("my runs.yaml", ("data.n=8",), local=True).typed("run")
        "mixednuts run 'my runs.yaml' --set data.n=8 --local"
        """
        sets = (part for override in self.overrides for part in ("--set", override))
        to = ("--address", self.address) if self.address else ()
        options = [*sets, *["--local"] * self.local, *to, *["--trust-code"] * self.trust]
        return shlex.join(["mixednuts", *command.split(), self.source, *options])

    def require_inputs(self) -> None:
        """Check that everything that the configuration names exists, then print the run id.

        The run id is printed before PyTorch is loaded, which takes seconds.

        Raises:
            ConfigError: for an untrusted run that references code or files elsewhere.
            MixedNutsError: for missing files, as in `uris`.
        """
        config = self.config
        outside = {key: source.written for key, source in config.sources.items() if source.reaches_out}
        if outside and not config.trusted:
            raise ConfigError(needs_trust(self.source, outside))
        config.check_sources()
        line = f"run {config.run_id()} in {config.storage}: loading PyTorch"
        if log_is_json():
            logger.info(line, extra={"run": config.run_id()})
        else:
            MESSAGES.print(line)

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
            shown(MESSAGES) as progress,
        ):
            if prints is not None:
                prints.file = stdout
            executor.report = progress.doing
            progress.doing("inspecting the images and trying the classifiers on a few of them")
            return work(executor=executor, progress=progress)


def on_config(function: Callable[..., None]) -> Callable[..., None]:
    """Add CONFIG and --set to a command; the function receives an `Invocation` and its other options.

    Libraries that take seconds to load are imported inside the function, after the configuration has been checked.
    """
    return _on_config(function, "CONFIG")


def on_config_or_run(function: Callable[..., None]) -> Callable[..., None]:
    """Add CONFIG|RUN, --set and --trust-code to a command, as `on_config` does."""
    return _on_config(trust_option(function), "CONFIG|RUN")


def _on_config(function: Callable[..., None], takes: str) -> Callable[..., None]:
    @click.argument("config", metavar=takes)
    @set_option
    @functools.wraps(function)
    def invoked(
        config: str, overrides: tuple[str, ...], trust_code: bool = False, address: str | None = None,
        local: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if local and address:
            raise click.UsageError("--local does not use a Ray cluster; drop --address")
        if is_folder(config) and "RUN" not in takes:
            raise ConfigError(f"{config} is a run, not a configuration file. Run: mixednuts run {config}")
        function(Invocation(config, overrides, address, local, trust_code), **options)

    return invoked


@contextmanager
def _stdout_on_stderr() -> Iterator[IO[str]]:
    """Redirect Python's stdout and file descriptor 1 to stderr, and yield a file that still writes to stdout."""
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


def is_folder(source: str) -> bool:
    """Return whether `source` is a folder or URI (RUN or STORAGE) instead of a file (CONFIG).

    Raises:
        MissingArtifact: if no such file or folder exists.
    """
    if "://" in source or os.path.isdir(source):  # noqa: PTH112, os.path.isdir returns False for a name that is too long
        return True
    if not os.path.isfile(source) and not source.endswith((".yaml", ".yml")):  # noqa: PTH113
        raise MissingArtifact(_no_run(source))
    return False


def open_folder(source: str) -> "Store":
    """Open RUN or STORAGE."""
    from ..storage.outages import FIRST_ANSWER_SECONDS
    from ..storage.store import Store

    return Store(source, FIRST_ANSWER_SECONDS)


def run_folder(source: str) -> "Store":
    """Open the folder or URI of a run.

    Raises:
        MissingArtifact: if it holds no run.
    """
    store = open_folder(source)
    if not store.exists("run.yaml"):
        raise MissingArtifact(_no_run(source))
    return store


def _no_run(source: str) -> str:
    folder, _, name = source.rstrip("/").rpartition("/")
    hint = ". Pass a YAML file, or the folder or URI of a run, <storage>/<name>/runs/<run id>"
    with suppress(OSError):
        hint = did_you_mean(name, os.listdir(folder or ".")) or hint  # noqa: PTH208
    return f"{source} is neither a run nor a configuration file{hint}"


@contextmanager
def reported(interrupted: str = INTERRUPTED) -> Iterator[None]:
    """Turn errors, without passwords, and signals into one line and an exit status.

    An error of this package exits with status 1, a signal with 128 plus its number.
    """
    _configure_logging()
    received: list[int] = []
    with _interruptible(received):
        try:
            yield
            if received:  # the KeyboardInterrupt may be lost, for example in a destructor, which swallows exceptions
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt) as error:
            # In the middle of an import or inside Ray an interrupt may become an error of any kind.
            if received or isinstance(error, KeyboardInterrupt):
                with suppress(OSError):  # the terminal may be closed
                    MESSAGES.print(interrupted)
                sys.exit(128 + (received[0] if received else signal.SIGINT))
            if not isinstance(error, MixedNutsError):
                raise
            MESSAGES.print(f"{type(error).__name__}: ", style="red", end="")
            MESSAGES.print(redacted(printable(str(error))))
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


def _configure_logging() -> None:
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
    if MESSAGES.is_terminal:
        handler = RichHandler(console=MESSAGES, show_path=False, markup=False, highlighter=NullHighlighter())
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

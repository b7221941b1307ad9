"""The command `mixednuts`, and its stages. Heavy libraries are imported once the configuration is known to be sound."""

import json
import os
from contextlib import suppress
from functools import partial
from itertools import pairwise

import click
from rich.console import Console

from ..config.register import STAGES, Entry
from ..config.run_config import load_config
from ..errors import MissingArtifact, MixedNutsError
from .laboratory import compare, runs
from .options import (
    Invocation,
    config_of,
    examples,
    json_option,
    print_result,
    reported,
    run_command,
    run_or_config_argument,
    set_option,
    trust_option,
    verbose_option,
)
from .setup import check, fetch, init, list_entries, schema
from .sizing import describe, estimate
from .tools import benchmark, export, open_page, prepare, study, submit, verify

__all__ = ["attack", "evaluate", "main", "report", "run", "search", "status", "study"]


@run_command(
    "run jobs/configs/digits.yaml",
    "run mine.yaml --set storage=s3://bucket/prefix --set compute.num_workers=8",
    "run mine.yaml --local",
    as_json=True,
)
def run(given: Invocation, as_json: bool) -> None:
    """All stages in order; what is done is skipped."""
    from .. import pipeline

    print_result(given.on_ray(partial(pipeline.run, given.config)), as_json)
    if given.config.std is not None:
        from ..deployment.loading import loading_line

        line = loading_line(given.config, f"{given.config.storage}/{given.config.run_id()}")
        given.console.print(line, highlight=False, soft_wrap=True)


def stage_command(entry: Entry) -> click.Command:
    """A registered stage as a command: what it lacks of CONFIG's run is computed."""

    def command(given: Invocation) -> None:
        from ..stages.stage import stage_of

        opened = given.on_ray(partial(stage_of(given.config, entry.name).run, given.config))
        from ..reports.report import stage_tables
        from ..reports.table import print_table

        try:
            tables = stage_tables(opened, [entry.name])
        except MissingArtifact as missing:  # the stage is done; what it says of the mixture waits for the search
            given.console.print(f"no table yet: {missing}", highlight=False, markup=False, soft_wrap=True)
        else:
            for title, table in tables.items():
                print_table(table, Console(), title)
            further = dict(stage_of(given.config, entry.name).further())
            if entry.name in given.config.added_stages():
                further = {"the whole run, with this on its page": "", **further}
            for why, override in further.items():
                line = f"Next, {why}: {given.typed('run', *filter(None, [override]))}"
                given.console.print(line, highlight=False, markup=False, soft_wrap=True)

    command.__name__, command.__doc__ = entry.name, f"{entry.describes[:1].upper()}{entry.describes[1:]}."
    options = entry.facts.get("options", {})
    shown = "".join(f" --{name} {example}" for name, example in options.items())
    keys = {name: f"{entry.name}.{name}" for name in options}
    example = f"{entry.name} mine.yaml{shown}"
    return run_command(example, f"{example} --address 10.0.0.7:6379", short_for=keys)(command)


STAGE_COMMANDS = {entry.name: stage_command(entry) for entry in STAGES.entries().values()}
attack, evaluate = STAGE_COMMANDS["attack"], STAGE_COMMANDS["evaluate"]


@run_command("search mine.yaml --beta 0.97", beta=True)
def search(given: Invocation) -> None:
    """s, p, c and alpha for every beta from the cached logits, and rounds that attack the choice (search.rounds)."""
    from ..reports.table import print_table
    from ..reports.tables import search_table
    from ..stages import search as stage

    result = given.on_ray(partial(stage.run, given.config))
    print_table(search_table(result), Console(), f"criterion {result.criterion}")
    line = f"run {given.config.run_id()} in {given.config.storage}"
    given.console.print(line, highlight=False, markup=False, soft_wrap=True)


@run_command(
    "report mine.yaml --json",
    "report runs/mine-0af3c2d1",
    ray=False,
    as_json=True,
    looks=True,
)
def report(given: Invocation, as_json: bool) -> None:
    """Tables, figures and the page of a finished run."""
    from ..reports import report as stage
    from .terminal import TerminalProgress

    with TerminalProgress(given.console) as progress:
        progress.doing("drawing the tables, the figures and the page")
        results = stage.run(given.config, progress=progress)
    print_result(results, as_json)


@click.command(
    epilog=examples("status mine.yaml --watch", "status runs/mine-0af3c2d1", "status s3://bucket/runs/mine-0af3c2d1")
)
@run_or_config_argument
@set_option
@json_option
@trust_option
@click.option("--watch", is_flag=True, help="Show it anew every few seconds until the run ends or Ctrl-C.")
@verbose_option
def status(config: str, overrides: tuple[str, ...], *, as_json: bool, trust: bool, watch: bool, verbose: bool) -> None:
    """What is done, what is missing, what failed; reads the storage only."""
    if watch and as_json:
        raise click.UsageError("--watch draws on a terminal; take --json again and again in its place")
    with reported(verbose, interrupted="the run goes on; only watching it has ended"):
        loaded = config_of(config, overrides, trust=trust)
        from .status import print_status, run_status, watch_status

        if watch:
            watch_status(loaded, Console())
        elif as_json:
            click.echo(json.dumps(run_status(loaded).to_json(), indent=2))
        else:
            print_status(run_status(loaded), Console())


SECTIONS = {
    "Before a run": (init, check, fetch, describe, estimate, prepare),
    "A run, whole or stage by stage": (run, *dict.fromkeys((attack, search, *STAGE_COMMANDS.values())), report),
    "Elsewhere, and later": (submit, status, open_page, verify),
    "With what came out": (compare, runs, export),
    "Around it": (study, benchmark, list_entries, schema),
}


class _Sections(click.Group):
    """A group whose help lists the commands in the order in which one needs them.

    Stages that the configuration's own extensions register are commands too.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        added = None if args[0] in self.commands else _added_stage(*args)
        if added is None:
            return super().resolve_command(ctx, args)
        return args[0], stage_command(added), args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(len(name) for name in self.commands)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                rows = [(f"{command.name:<{width}}", command.get_short_help_str(80)) for command in commands]
                formatter.write_dl(rows)


def _added_stage(name: str, *arguments: str) -> Entry | None:
    """The stage of that name, if an extension of a configuration among the arguments registers it."""
    overrides = [value for flag, value in pairwise(arguments) if flag == "--set"]
    for path in filter(os.path.isfile, arguments):
        with suppress(MixedNutsError):  # the command itself reports what is wrong with the file
            load_config(path, overrides)
    return STAGES.entries().get(name)


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples("init mine.yaml", "check mine.yaml", "run mine.yaml", "run jobs/configs/digits.yaml"),
)
@click.version_option(package_name="mixednuts-dist")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json: progress and log, one object a line.",
)
def main(log_format: str) -> None:
    """Mix an accurate and a robust classifier without training: attack, search, evaluate, report, on Ray."""


for _section in SECTIONS.values():
    for _command in _section:
        main.add_command(_command)
